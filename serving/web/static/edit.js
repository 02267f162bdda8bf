// The dialog that changes the label and the metadata of an item, against the version that it showed.
import {call, galleryPath} from "./api.js";
import {h} from "./dom.js";

const KINDS = ["text", "number", "yes or no", "list", "object", "nothing"];
const STARTS = {text: "", number: 0, "yes or no": false, list: [], object: {}, nothing: null};
let readOnly = false; // the server refused a change to this key

export const mayEdit = () => !readOnly;

export function kindOf(value) {
  if (value === null) return "nothing";
  if (Array.isArray(value)) return "list";
  return {string: "text", number: "number", boolean: "yes or no"}[typeof value] ?? "object";
}

// The text of a control -> the value of that kind; throws a sentence where it is none.
export function parsed(kind, text, name) {
  if (kind === "text") return text;
  if (kind === "nothing") return null;
  if (kind === "yes or no") return text === "yes";
  if (kind === "number") {
    const number = text.trim() === "" ? NaN : Number(text);
    if (Math.abs(number) < 2 ** 53) return number;
    throw new Error(`${name}: ${text || "nothing"} is no number of magnitude below 2^53.`);
  }
  let value;
  try { value = JSON.parse(text); } catch { /* told below */ }
  if (kindOf(value ?? null) === kind) return value;
  throw new Error(`${name}: write the ${kind} as JSON, such as ${kind === "list" ? '["red", 4]' : '{"width": 4}'}.`);
}

// Fields as they were and as they are -> what UpdateItems is to merge: null removes a field.
export function difference(before, after) {
  const changed = Object.entries(after).filter(([name, value]) =>
    !Object.hasOwn(before, name) || JSON.stringify(value) !== JSON.stringify(before[name]));
  return Object.fromEntries([...Object.keys(before).filter((name) => !Object.hasOwn(after, name)).map((name) => [name, null]), ...changed]);
}

function control(kind, value) {
  const name = {"aria-label": "Value"};
  if (kind === "yes or no")
    return h("select", name, ["yes", "no"].map((each) => h("option", {selected: (each === "yes") === value}, each)));
  if (kind === "number") return h("input", {...name, type: "number", step: "any", value});
  if (kind === "nothing") return h("input", {...name, disabled: true, value: ""});
  return h("textarea", {...name, rows: kind === "text" ? 1 : 3}, kind === "text" ? value : JSON.stringify(value));
}

// A field -> its row; `row.read()` gives [name, value], the value as it came where nobody touched it.
function field(name, value) {
  let kind = kindOf(value), touched = false;
  const title = h("input", {value: name, "aria-label": "Name of the field", required: true});
  const kinds = h("select", {"aria-label": `Kind of ${name || "the field"}`}, KINDS.map((each) => h("option", {selected: each === kind}, each)));
  let input = control(kind, value);
  kinds.addEventListener("change", () => {
    [kind, touched] = [kinds.value, true];
    const fresh = control(kind, STARTS[kind]);
    input.replaceWith(fresh);
    input = fresh;
  });
  const row = h("div", {class: "field-row", on: {input: (event) => { touched ||= event.target === input; }}}, title, kinds, input,
    h("button", {type: "button", class: "quiet", "aria-label": `Remove ${name || "the field"}`, on: {click: () => row.remove()}}, "✕"));
  row.read = () => [title.value, touched ? parsed(kind, input.value, title.value) : value];
  return row;
}

const shown = (value) => (value === undefined || value === null ? "—" : typeof value === "string" ? value : JSON.stringify(value));

// Opens the dialog; `saved` is called after a change is on the server's disk.
export async function edit(gallery, key, saved) {
  const path = `${galleryPath(gallery)}/items`;
  const load = async () => (await call("GET", `${path}/${key.split("/").map(encodeURIComponent).join("/")}`)).item;
  let item = await load();
  const label = h("input", {name: "label"});
  const fields = h("div", {class: "fields"});
  const told = h("div", {role: "alert"});
  const dialog = h("dialog", {id: "edit-dialog", "aria-labelledby": "edit-title", on: {close: () => dialog.remove()}});
  const fill = () => {
    label.value = item.label ?? "";
    fields.replaceChildren(...Object.entries(item.metadata ?? {}).map((each) => field(...each)));
    told.replaceChildren();
  };
  const change = () => {
    const rows = [...fields.children].map((row) => row.read());
    if (new Set(rows.map(([name]) => name)).size < rows.length) throw new Error("Two fields have the same name.");
    const metadata = difference(item.metadata ?? {}, Object.fromEntries(rows));
    return {key, ...(Object.keys(metadata).length && {metadata}), ...(label.value !== (item.label ?? "") && {label: label.value})};
  };
  const send = async (wanted, version) => {
    try {
      await call("PATCH", path, {items: [{...wanted, expected_version: version}]});
      dialog.close();
      saved();
    } catch (error) {
      if (error.status === 403) readOnly = true;
      if (error.status === 409) await conflict(wanted);
      else told.replaceChildren(h("p", {class: "error"}, readOnly ? "This API key may read items but not change them. Ask for a key with the write role." : error.message));
    }
  };
  const conflict = async (wanted) => {
    const now = await load();
    const line = (name, value, there) => h("tr", {}, h("th", {scope: "row"}, name), h("td", {}, shown(there)), h("td", {}, shown(value)));
    told.replaceChildren(
      h("p", {class: "error"}, "Someone changed this item while it was open here."),
      h("table", {}, h("thead", {}, h("tr", {}, ["Field", "There now", "Yours"].map((each) => h("th", {scope: "col"}, each)))),
        h("tbody", {}, "label" in wanted ? line("label", wanted.label, now.label) : null,
          Object.entries(wanted.metadata ?? {}).map(([name, value]) => line(name, value, now.metadata?.[name])))),
      h("button", {type: "button", on: {click: () => send(wanted, now.version)}}, "Write mine over it"),
      h("button", {type: "button", on: {click: () => { item = now; fill(); }}}, "Take what is there"));
  };
  const submit = async (event) => {
    event.preventDefault();
    try {
      const wanted = change();
      if (Object.keys(wanted).length === 1) dialog.close();
      else await send(wanted, item.version);
    } catch (error) {
      told.replaceChildren(h("p", {class: "error"}, error.message));
    }
  };
  dialog.append(h("form", {on: {submit}}, h("h2", {id: "edit-title"}, key), h("label", {}, "Label ", label), fields,
    h("button", {type: "button", class: "quiet", on: {click: () => fields.append(field("", ""))}}, "Add a field"), told,
    h("div", {class: "row"}, h("button", {type: "submit", class: "primary"}, "Save"), h("button", {type: "button", on: {click: () => dialog.close()}}, "Cancel"))));
  fill();
  document.body.append(dialog);
  dialog.showModal();
}
