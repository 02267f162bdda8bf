// Builds elements. Text only ever becomes text nodes: nothing here, or anywhere on the page, parses HTML.

/** Make an element: `class`, `dataset` and `on` {event: listener} are special, booleans become properties, the rest
 * attributes; children are nodes, strings and lists of them, and null is skipped. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined) continue;
    if (name === "class") element.className = value;
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (typeof value === "boolean") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Tell screen readers of something that happened, without moving the focus. */
export function announce(text) {
  document.getElementById("live").textContent = text;
}

let fading;

/** Show a line for some seconds, as for a file that is refused. */
export function toast(text) {
  const place = document.getElementById("toast");
  place.textContent = text;
  place.classList.add("shown");
  clearTimeout(fading);
  fading = setTimeout(() => place.classList.remove("shown"), 6000);
}

/** A button; `props` as for `h`. */
export function button(text, press, props = {}) {
  return h("button", { type: "button", ...props, on: { click: press, ...props.on } }, text);
}

/** Text with what stands in `backticks` as code. */
export const coded = (text) => text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));

/** Show that there is nothing, and what to do: a title, lines of text (as for `coded`) or nodes, and buttons. */
export function notice(title, lines = [], ...buttons) {
  return h("div", { class: "notice" }, h("h2", {}, title), lines.map((line) => h("p", {}, typeof line === "string" ? coded(line) : line)), buttons);
}

/** Open a dialog of this content until it is closed; `props` as for `h`. */
export function openDialog(props, ...children) {
  const dialog = h("dialog", props, children);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** A table: `heads` and the rows of the body, made already, under a caption. */
export function table(id, caption, heads, rows) {
  return h("table", { id }, h("caption", {}, caption),
    h("thead", {}, h("tr", {}, heads.map((each) => h("th", { scope: "col" }, each)))), h("tbody", {}, rows));
}

/** Show a fault and what to do about it; `again` is called by its button. */
export function problem(error, again) {
  const [title, line] = {
    0: ["The server does not answer", "Look whether `crossbatch serve` still runs, then try again."],
    401: ["The server wants an API key", "An administrator makes one with `crossbatch keys`."],
    403: ["The API key does not allow this", "It needs a key with another role; close this tab to forget the one in use."],
    404: ["That is not there", "It may have been deleted or renamed."],
    412: ["This gallery cannot be searched", null],
    429: ["The server is busy", "It has as many calls as it takes. Try again in a moment."],
    501: ["The server cannot do this", "It is older than this page: install the same version of both."],
    503: ["The server is starting or stopping", "Try again in a moment."],
    504: ["The server took too long", "Try again, or ask for less at once."],
  }[error.status] ?? ["That did not work", null];
  const retry = again && button("Try again", again, { class: "primary" });
  return h("div", { role: "alert" }, notice(title, [error.message, line].filter(Boolean), retry));
}

/** A score as it is shown everywhere. */
export const digits = (score) => (score ?? 0).toFixed(3).replace("-", "−");

/** A field as people call it. */
export const fieldName = (name) => (name === "$label" ? "label" : name);

/** A whole number, grouped by thousands. */
export const count = (number) => Number(number ?? 0).toLocaleString("en");
