// The filter: conditions [field, operator, value], in the address as JSON; all must hold, and several "is" of one
// field are alternatives; the value of "within" is boxes [left, right, top, bottom] of the map, one of
// which must hold. It becomes the proto's Filter for the server, and the short form for people.
import { fieldsOf, valuesOf } from "./api.js";
import { button, count, fieldName, h } from "./dom.js";

const OPERATORS = { is: "is", not: "is not", least: "at least", most: "at most", has: "is there", within: "within" };

const isBoxes = (value) => Array.isArray(value) && value.every((box) => Array.isArray(box) && box.length === 4 && box.every(Number.isFinite));

/** Read conditions from the address; what is none is left out. */
export function conditions(text) {
  try {
    return JSON.parse(text || "[]").filter((each) => {
      const [field, operator, value] = Array.isArray(each) ? each : [];
      return typeof field === "string" && Object.hasOwn(OPERATORS, operator) && (operator !== "within" || isBoxes(value));
    });
  } catch {
    return [];
  }
}

/** Write conditions for the address; null where there are none. */
export const written = (rows) => (rows.length ? JSON.stringify(rows) : null);

const wired = (value) => ({ [typeof value]: value }); // {string: ..}, {number: ..} or {boolean: ..}

function alternatives(rows) {
  const groups = new Map();
  for (const [field, operator, value] of rows) {
    const group = `${operator} ${operator === "is" ? field : groups.size}`;
    groups.set(group, { field, operator, values: [...(groups.get(group)?.values ?? []), value] });
  }
  return [...groups.values()];
}

const box = ([left, right, top, bottom]) => ({ all_of: { filters: [["map_x", left, right], ["map_y", top, bottom]]
  .map(([field, least, most]) => ({ range: { field, least: wired(least), most: wired(most) } })) } });

/** The proto's Filter as JSON; undefined for no conditions. */
export function message(rows) {
  const filters = alternatives(rows).map(({ field, operator, values }) => {
    if (operator === "is") return { among: { field, values: values.map(wired) } };
    if (operator === "not") return { negated: { equal: { field, value: wired(values[0]) } } };
    if (operator === "has") return { exists: field };
    if (operator === "within") return { any_of: { filters: values[0].map(box) } };
    return { range: { field, [operator]: wired(values[0]) } };
  });
  return filters.length ? (filters.length > 1 ? { all_of: { filters } } : filters[0]) : undefined;
}

/** The short form, as the Python client and the command line have it; undefined for no conditions. */
export function short(rows) {
  const each = alternatives(rows).map(({ field, operator, values }) => {
    const value = values[0];
    if (operator === "is") return { [field]: values.length > 1 ? { $in: values } : value };
    if (operator === "within") return { $or: value.map(([left, right, top, bottom]) => ({ map_x: { $gte: left, $lte: right }, map_y: { $gte: top, $lte: bottom } })) };
    return { [field]: { not: { $ne: value }, has: { $exists: true }, least: { $gte: value }, most: { $lte: value } }[operator] };
  });
  return each.length ? (each.length > 1 ? { $and: each } : each[0]) : undefined;
}

/** A condition in words. */
export const told = ([field, operator, value]) =>
  `${fieldName(field)} ${OPERATORS[operator]}${operator === "has" ? "" : operator === "within" ? " an outline" : ` ${value}`}`;

/** The form: {element, update(gallery, text)}; `onChange(text)` gets what is to stand in the address, or null. */
export function filterForm({ onChange }) {
  let gallery = null, rows = [], fields = [], values = [], asked = 0, wait;
  const chips = h("ul", { class: "chips", role: "list", "aria-label": "Filter" });
  const field = h("select", { id: "filter-field", on: { change: chosen } });
  const operator = h("select", { id: "filter-operator", on: { change: fit } },
    Object.entries(OPERATORS).filter(([name]) => name !== "within").map(([name, text]) => h("option", { value: name }, text)));
  const value = h("input", { id: "filter-value", list: "filter-values", autocomplete: "off", placeholder: "value", on: {
    input: () => { clearTimeout(wait); wait = setTimeout(suggest, 150); }, focus: suggest } });
  const list = h("datalist", { id: "filter-values" });
  const hint = h("p", { class: "soft", id: "filter-hint", "aria-live": "polite" });
  value.setAttribute("aria-describedby", "filter-hint");
  const element = h("form", { class: "filters", on: { submit: add } }, chips,
    h("div", { class: "fields" },
      h("label", {}, "Field", field), h("label", {}, "Condition", operator),
      h("label", {}, "Value", value, list), h("button", { id: "filter-add" }, "Add")), hint);

  const kinds = () => fields.find((each) => each.name === field.value)?.kinds ?? [];

  function fit() {
    value.parentNode.hidden = operator.value === "has";
    const { least, most } = fields.find((each) => each.name === field.value) ?? {};
    value.placeholder = least === undefined ? "value" : `${least} to ${most}`;
  }

  function typed() {
    const text = value.value.trim(), known = values.find((each) => String(each) === text);
    if (known !== undefined) return known;
    if (kinds().includes("number") && text !== "" && Number.isFinite(Number(text))) return Number(text);
    if (kinds().includes("boolean") && /^(true|false)$/i.test(text)) return text.toLowerCase() === "true";
    return text;
  }

  function add(event) {
    event.preventDefault();
    const has = operator.value === "has";
    if (!has && value.value.trim() === "") return value.focus();
    const row = has ? [field.value, "has"] : [field.value, operator.value, typed()];
    value.value = "";
    change([...rows.filter((each) => JSON.stringify(each) !== JSON.stringify(row)), row]);
  }

  function change(next) {
    rows = next;
    show();
    onChange(written(rows));
  }

  function show() {
    chips.replaceChildren(...rows.map((row) => h("li", {}, told(row),
      button("×", () => change(rows.filter((each) => each !== row)), { "aria-label": `Remove: ${told(row)}`, title: "Remove" }))));
    chips.hidden = rows.length === 0;
  }

  function chosen() {
    if (!kinds().includes("number") && operator.value !== "has") operator.value = "is"; // texts have an order, too, but few mean it
    suggest();
  }

  async function suggest() {
    fit();
    const mine = ++asked;
    try {
      const found = await valuesOf(gallery, field.value, 50, value.value.trim());
      if (mine !== asked) return;
      values = found.values.map(([each]) => each);
      list.replaceChildren(...found.values.map(([each, items]) => h("option", { value: String(each) }, `${count(items)} items`)));
      hint.textContent = found.distinct ? `${count(found.distinct)} ${found.distinct === 1 ? "value" : "values"}` : "No value begins so.";
    } catch {
      hint.textContent = ""; // it is filtered by what is typed, then
    }
  }

  return {
    element,
    async update(name, text) {
      rows = conditions(text);
      show();
      if (name === gallery || !name) return;
      gallery = name;
      fields = [{ name: "$label", kinds: ["string"] }];
      try {
        const found = await fieldsOf(name);
        if (name !== gallery) return;
        fields = [...fields, ...found.filter((each) => each.name !== "$label" && each.kinds?.length)];
      } catch { /* the label can be filtered by in any case */ }
      field.replaceChildren(...fields.map((each) => h("option", { value: each.name }, fieldName(each.name))));
      fit();
    },
  };
}
