"""Why a step takes as long as it does: causes, the critical path, gaps, memory, and what would help."""
