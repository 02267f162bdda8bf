// Browse: the galleries of the server; the fields, items and likely duplicates of one, never more than a page of them.
import { call, fieldsOf, galleryPath, item, valuesOf } from "./api.js";
import { announce, button, count, digits, fieldName, h, notice, toast } from "./dom.js";
import { edit, mayEdit } from "./edit.js";
import { conditions, filterForm, message, written } from "./filters.js";
import { fill, stop } from "./fill.js";
import { grid } from "./grid.js";
import { href, read, write } from "./state.js";

const PAGE = 60, COMPARED = 200, VALUES = 30; // cards; items compared in one call for duplicates; values of a field
const FRESH = { show: null, prefix: null, page: null, seed: null };
const OWN = { ...FRESH, above: null }; // what other views do not know
let ui = null, shown = "", listed = "";

const link = (patch) => href({ ...OWN, ...patch });
const searchBy = ({ key }) => write({ ...OWN, view: "search", key, photo: null });

function describe({ name, model_name, dimension, items, index_type, recall, problem: fault }, chosen) {
  const facts = fault ? h("p", { class: "fault" }, fault.message)
    : h("p", { class: "soft" }, `${count(items)} items of ${dimension} numbers by ${model_name}; ` +
    `${index_type === "exact" ? "searched exactly" : `index ${index_type}, recall ${digits(recall)}`}`);
  return h("li", {}, h("a", { href: link({ gallery: name, filter: null, key: null }), ...(name === chosen && { "aria-current": "true" }) }, name), facts);
}

function field({ name, kinds = [], items, least, most }) {
  const values = h("ul", { role: "list", class: "values" });
  const open = async (event) => {
    if (!event.target.open || values.childElementCount) return;
    try {
      const found = await valuesOf(read().gallery, name, VALUES), rest = found.distinct - VALUES;
      values.replaceChildren(...found.values.map((each) => value(name, ...each)),
        rest > 0 ? h("li", { class: "soft" }, `and ${count(rest)} more: type them in the filter`) : "");
    } catch (error) {
      values.replaceChildren(h("li", { role: "alert" }, error.message));
    }
  };
  const range = least === undefined ? "" : `, ${least} to ${most}`;
  return h("li", {}, h("details", { on: { toggle: open } }, h("summary", {}, fieldName(name),
    h("span", { class: "soft" }, ` ${count(items)} ${kinds.join(", ")}${range}`)), values));
}

function value(name, of, items) {
  const rows = conditions(read().filter), row = [name, "is", of], others = rows.filter((each) => JSON.stringify(each) !== JSON.stringify(row));
  const choose = () => write({ ...FRESH, filter: written(others.length < rows.length ? others : [...others, row]) });
  return h("li", {}, button([h("span", {}, String(of)), h("b", {}, count(items))], choose));
}

const show = (state) => fill(ui.main, (signal) => (state.show === "duplicates" ? duplicates : items)(state, signal));

async function items(state, signal) {
  const rows = conditions(state.filter), path = galleryPath(state.gallery), random = state.show === "random";
  const asked = { filter: message(rows), with_thumbnails: true };
  const [reply, counted] = await Promise.all([random
    ? call("POST", `${path}/items:sample`, { ...asked, size: PAGE, seed: state.seed }, { signal })
    : call("POST", `${path}/items:list`, { ...asked, page_size: PAGE, page_token: state.page, key_prefix: state.prefix }, { signal }),
  state.prefix ? {} : call("POST", `${path}/items:count`, { filter: asked.filter }, { signal })]);
  const { items: found = [], next_page_token } = reply;
  const again = () => { show(read()); listFields(listed); };
  const change = ({ key }) => edit(state.gallery, key, again).catch((error) => toast(error.message));
  const actions = mayEdit() ? [{ name: "edit", title: "Edit label and metadata", text: "✎", key: "e", run: change }] : [];
  const cards = grid(found, { onPick: searchBy, actions });
  cards.id = "browse-items";
  const told = state.prefix ? `Keys that begin with ${state.prefix}`
    : random ? `${count(found.length)} of ${count(counted.items)} items, at random` : `${count(counted.items)} items`;
  announce(told);
  const none = state.prefix ? `No key begins with “${state.prefix}”.` :
    rows.length ? "No item fulfils the filter." : "The gallery is empty: index pictures into it.";
  if (!found.length) return [notice("Nothing here", [none])];
  return [h("h2", {}, told), cards, h("div", { class: "buttons" },
    next_page_token ? button("Next page", () => write({ page: next_page_token }), { id: "next-page", class: "primary" }) : null,
    state.page ? button("First page", () => write({ page: null })) : null)];
}

async function duplicates(state, signal) {
  const above = Number(state.above ?? 0.95), looked = h("p", { role: "status" });
  let reply = { next_page_token: state.page };
  ui.main.replaceChildren(looked);
  do {
    const body = { above, page_size: COMPARED, page_token: reply.next_page_token };
    reply = await call("POST", galleryPath(state.gallery, "/duplicates:list"), body, { signal });
    looked.textContent = `${count(reply.compared)} of ${count(reply.items)} items compared`;
  } while (!reply.pairs?.length && reply.next_page_token);
  const pairs = (reply.pairs ?? []).slice(0, PAGE), keys = [...new Set(pairs.flatMap(({ key, other }) => [key, other]))];
  const found = new Map(await Promise.all(keys.map(async (key) => [key, await item(state.gallery, key, { signal }).catch(() => ({ key }))])));
  const pair = ({ key, other, score }) => {
    const both = [key, other].map((each) => found.get(each)), same = both[0].label === both[1].label;
    return h("li", { class: "alike" }, h("p", {}, h("b", {}, digits(score)), same ? " same label" : " different labels"),
      grid(both, { onPick: searchBy }));
  };
  const more = (reply.pairs ?? []).length - pairs.length;
  return [looked, pairs.length ? h("ul", { id: "duplicates", role: "list" }, pairs.map(pair)) : notice("No likely duplicates", [
    `No pair from here on has a score of ${above} or more. Lower the score to see more.`]),
    more > 0 ? h("p", {}, `and ${count(more)} pairs with lower scores: raise the least score to see them apart`) : "",
    reply.next_page_token ? button("Compare further", () => write({ page: reply.next_page_token }), { id: "next-page", class: "primary" }) : ""];
}

function mount(root) {
  const open = (patch) => () => write({ ...OWN, ...patch });
  const prefix = () => write({ ...OWN, filter: null, prefix: ui.key.value }, { replace: Boolean(read().prefix) });
  let wait;
  ui = {
    galleries: h("ul", { id: "gallery-list", role: "list" }), fields: h("ul", { id: "field-list", role: "list" }),
    filter: filterForm({ onChange: (filter) => write({ ...FRESH, filter }) }), main: h("div"),
    key: h("input", { id: "key-input", type: "search", autocomplete: "off", placeholder: "beginning of a key", on: {
      input: () => { clearTimeout(wait); wait = setTimeout(() => ui && prefix(), 250); } } }),
    above: h("input", { id: "above-input", type: "range", min: 0.5, max: 1, step: 0.01, on: {
      input: () => { ui.aboveTold.textContent = ui.above.value; }, change: () => write({ above: ui.above.value, page: null }) } }),
    aboveTold: h("output"),
    modes: { "": button("All items", open({})),
      random: button("Random", () => write({ ...OWN, show: "random", seed: 1 + Math.floor(Math.random() * 2 ** 31) })),
      duplicates: button("Likely duplicates", open({ show: "duplicates" })) },
  };
  ui.slider = h("label", { class: "slider" }, h("span", {}, "Least score ", ui.aboveTold), ui.above);
  root.append(h("div", { class: "split" },
    h("section", { class: "controls", "aria-label": "Galleries, fields and filter" },
      h("details", { class: "fold", open: matchMedia("(min-width: 60rem)").matches },
      h("summary", {}, "Galleries, fields and filter"), h("h3", {}, "Galleries"), ui.galleries,
      h("h3", {}, "Fields"), ui.fields, h("h3", {}, "Filter"), ui.filter.element)),
    h("section", { "aria-label": "Items" },
      h("div", { class: "bar" }, h("label", {}, "Key", ui.key), Object.values(ui.modes), ui.slider), ui.main)));
}

async function listFields(name) {
  try {
    const fields = await fieldsOf(name);
    if (name === listed) ui?.fields.replaceChildren(...fields.map(field));
  } catch (error) {
    ui?.fields.replaceChildren(h("li", { class: "soft" }, error.message));
  }
}

function update(state, context) {
  const asked = JSON.stringify([state.gallery, state.filter, ...Object.keys(OWN).map((name) => state[name])]);
  ui.galleries.replaceChildren(...context.galleries.map((each) => describe(each, state.gallery)));
  ui.filter.update(state.gallery, state.filter);
  if (document.activeElement !== ui.key) ui.key.value = state.prefix ?? "";
  ui.aboveTold.textContent = ui.above.value = state.above ?? 0.95;
  ui.slider.hidden = state.show !== "duplicates";
  for (const [name, mode] of Object.entries(ui.modes)) mode.setAttribute("aria-pressed", (state.show ?? "") === name);
  if (asked === shown) return;
  shown = asked;
  if (context.gallery.problem) return ui.main.replaceChildren(notice("This gallery cannot be used", [context.gallery.problem.message]));
  if (listed !== state.gallery) listFields((listed = state.gallery));
  show(state);
}

function unmount() {
  stop(ui.main);
  [ui, shown, listed] = [null, "", ""];
}

export default { name: "browse", title: "Browse", mount, update, unmount, keys: [["e", "edit the item"]] };
