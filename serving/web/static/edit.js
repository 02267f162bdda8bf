// The dialog that changes the label and the metadata of an item, against the version that it shows.
import { call, galleryPath, item } from "./api.js";
import { button, fieldName, h, openDialog } from "./dom.js";

const KINDS = { text: "", number: 0, "yes or no": false, list: [], object: {} }; // and what a field of it begins with
let readOnly = false; // a change was refused: the key of this tab may only read

/** Whether to offer changes: until the server has refused one. */
export const mayEdit = () => !readOnly;

const kindOf = (value) => ({ string: "text", number: "number", boolean: "yes or no" }[typeof value]
  ?? (Array.isArray(value) ? "list" : value === null ? "nothing" : "object"));

/** What is typed, as a value of a kind; throws a sentence that names the field where it is none. */
export function parsed(kind, text, name) {
  if (kind === "text") return text;
  if (kind === "yes or no") return text === "yes";
  let value = NaN;
  try { value = JSON.parse(kind === "number" ? Number(text || NaN) : text); } catch { /* told below */ }
  if (kindOf(value) === kind && (kind !== "number" || Math.abs(value) < 2 ** 53)) return value;
  throw new Error(`${name}: ${{ number: "this is no number of magnitude below 2^53", list: 'write a list as ["red", 4]', object: 'write an object as {"width": 4}' }[kind]}.`);
}

/** What UpdateItems is to merge into fields, to make others of them: null removes one. */
export function difference(before, after) {
  const same = (name) => Object.hasOwn(before, name) && JSON.stringify(before[name]) === JSON.stringify(after[name]);
  const gone = Object.keys(before).filter((name) => !Object.hasOwn(after, name)).map((name) => [name, null]);
  return Object.fromEntries([...gone, ...Object.entries(after).filter(([name]) => !same(name))]);
}

function control(kind, value) {
  const props = { "aria-label": "Value", disabled: kind === "nothing" };
  if (kind === "yes or no") return h("select", props, ["yes", "no"].map((each) => h("option", { selected: (each === "yes") === value }, each)));
  if (kind === "number") return h("input", { ...props, type: "number", step: "any", value });
  return h("textarea", { ...props, rows: kind === "text" ? 1 : 2 }, kind === "text" ? value : JSON.stringify(value));
}

/** The row of a field; its `read()` gives [name, value], the value as it came where nobody touched it. */
function row(name, value) {
  let kind = kindOf(value), touched = false, input = control(kind, value);
  const title = h("input", { value: name, "aria-label": "Name of the field", required: true });
  const change = (event) => {
    [kind, touched] = [event.target.value, true];
    const old = input;
    old.replaceWith((input = control(kind, KINDS[kind])));
  };
  const kinds = h("select", { "aria-label": "Kind of value", on: { change } },
    [...new Set([kind, ...Object.keys(KINDS)])].map((each) => h("option", { selected: each === kind }, each)));
  const element = h("div", { class: "field-row", on: { input: (event) => { touched ||= event.target === input; } } }, title, kinds, input,
    button("×", () => element.remove(), { class: "quiet", "aria-label": `Remove ${name || "the field"}` }));
  element.read = () => [title.value, touched ? parsed(kind, input.value, title.value) : value];
  return element;
}

/** Open the dialog; `saved` is called once a change is on the server's disk. */
export async function edit(gallery, key, saved) {
  let stored = await item(gallery, key);
  const label = h("input", { id: "edit-label" }), rows = h("div"), told = h("div", { role: "alert" });
  const tell = (...parts) => told.replaceChildren(h("p", { class: "fault" }, parts[0]), ...parts.slice(1));
  const fill = () => {
    label.value = stored.label ?? "";
    rows.replaceChildren(...Object.entries(stored.metadata ?? {}).map((each) => row(...each)));
    told.replaceChildren();
  };
  const send = async (wanted, expected_version) => {
    try {
      if (Object.keys(wanted).length) await call("PATCH", galleryPath(gallery, "/items"), { items: [{ key, expected_version, ...wanted }] });
      dialog.close();
      saved();
    } catch (error) {
      readOnly ||= error.status === 403;
      if (error.status === 409) return conflict(wanted).catch((failed) => tell(failed.message));
      tell(readOnly ? "The API key of this tab may read items, but not change them: that needs a key with the role write."
        : error.message.replace(/^items\[0\]: /, ""));
    }
  };
  const conflict = async (wanted) => {
    const now = await item(gallery, key), text = (value) => (value === null || value === undefined ? "nothing" : JSON.stringify(value));
    const both = Object.entries({ ...("label" in wanted && { $label: wanted.label }), ...wanted.metadata })
      .map(([name, value]) => h("li", {}, h("b", {}, fieldName(name)),
        `: ${text(name === "$label" ? now.label : now.metadata?.[name])} there now, ${text(value)} yours`));
    tell("Somebody changed this item while it was open here.", h("ul", {}, both), h("div", { class: "buttons" },
      button("Write mine over it", () => send(wanted, now.version)), button("Take what is there", () => { stored = now; fill(); })));
  };
  const submit = (event) => {
    event.preventDefault();
    try {
      const read = [...rows.children].map((each) => each.read()), after = Object.fromEntries(read);
      if (Object.keys(after).length < read.length) throw new Error("Two fields have the same name.");
      const metadata = difference(stored.metadata ?? {}, after);
      send({ ...(Object.keys(metadata).length && { metadata }), ...(label.value !== (stored.label ?? "") && { label: label.value }) }, stored.version);
    } catch (error) {
      tell(error.message);
    }
  };
  fill();
  const dialog = openDialog({ id: "edit-dialog", "aria-labelledby": "edit-title" },
    h("form", { on: { submit } }, h("h2", { id: "edit-title" }, key), h("label", {}, "Label", label), h("h3", {}, "Metadata"), rows,
      button("Add a field", () => rows.append(row("", ""))), told,
      h("div", { class: "buttons" }, button("Cancel", () => dialog.close()), h("button", { class: "primary" }, "Save"))));
}
