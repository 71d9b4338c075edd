"""Pictures of recorded runs: pure functions from `trace`'s records to HTML and SVG.  `style.CSS` gives them their look."""
