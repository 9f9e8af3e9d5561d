"""Problems of a page: none goes unheard, since every test ends by asking for them."""

from __future__ import annotations

from .chromium import Chromium


def test_what_a_page_complains_of_is_heard(opened: Chromium) -> None:
    opened.evaluate("console.warn('odd'), console.error('wrong'), console.log('well')")
    opened.evaluate("setTimeout(() => { throw new Error('thrown'); })")
    opened.evaluate("fetch('http://127.0.0.1:9/').catch(() => null)")
    opened.wait("true")
    odd, wrong, *more = opened.problems()
    assert (odd, wrong) == ("odd", "wrong")
    assert any("thrown" in each for each in more)
    assert "asked for http://127.0.0.1:9/" in more
    assert opened.problems() == []
