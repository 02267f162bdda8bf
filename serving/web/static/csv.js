// Tables as CSV (RFC 4180): rows to text and back, and a file to keep.
import { h } from "./dom.js";

const cell = (value) => (/^[\w./-]*$/.test(value) ? value : `"${value.replaceAll('"', '""')}"`);

/** Rows of strings and numbers to text. */
export const toCsv = (rows) => rows.map((row) => row.map((each) => cell(String(each))).join(",") + "\r\n").join("");

/** How many cells a spreadsheet may take for formulas: a key is written as it is, so this can only be told. */
export const risky = (rows) => rows.flat().filter((each) => /^[=+\-@\t\r]/.test(String(each))).length;

/** Text to rows of strings, empty lines left out; throws where a quote is open or stands within a value. */
export function fromCsv(text) {
  const rows = [[]], part = /(?:"((?:[^"]|"")*)"|([^",\r\n]*))(,|\r\n|\r|\n|$)/y, all = text.replace(/^\uFEFF/, "");
  for (let end = ","; part.lastIndex < all.length || end === ",";) {
    const found = part.exec(all);
    if (!found) throw new Error(`Row ${rows.length} is not CSV: a quote is open, or stands within a value.`);
    rows.at(-1).push(found[1]?.replaceAll('""', '"') ?? found[2]);
    end = found[3];
    if (end === "") break;
    if (end !== ",") rows.push([]);
  }
  return rows.filter((row) => row.some(Boolean));
}

/** Let the browser keep rows as a file. */
export function download(name, rows) {
  const address = URL.createObjectURL(new Blob([toCsv(rows)], { type: "text/csv" }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
