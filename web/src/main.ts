// The page: with data in it, the report of that; without, the live view of the training that serves it.
import { unpack } from "./data/block";
import { Report } from "./data/report";
import { follow } from "./live/follow";
import { Page, REPORT_TABS } from "./page";
import { Store } from "./state";
import "./style.css";
import { h } from "./ui/dom";
import { header } from "./ui/header";
import { Themes } from "./ui/theme";

function start(report: Report): void {
  const themes = new Themes();
  const store = new Store();
  const page = new Page(REPORT_TABS, store, themes, () => ({ elements: [], resize: () => undefined }));
  document.title = `Piper: ${report.title}`;
  page.header = header(report, () => themes.toggle(), () => page.help.toggle());
  page.show(report);
  document.documentElement.dataset.ready = "yes";
}

const data = document.getElementById("piper-data")?.textContent ?? "";
if (!data.trim()) follow();
else
  unpack(data)
    .then((found) => start(new Report(found)))
    .catch((error: unknown) => {
      document.body.append(h("p", { class: "empty" }, `This report cannot be shown: ${String(error)}`));
      throw error;
    });
