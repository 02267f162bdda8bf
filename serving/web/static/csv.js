// Tables as CSV (RFC 4180), to keep as a file.
import { h } from "./dom.js";

const cell = (value) => (/^[\w./-]*$/.test(value) ? value : `"${value.replaceAll('"', '""')}"`);

/** Rows of strings and numbers to text. */
export const toCsv = (rows) => rows.map((row) => row.map((each) => cell(String(each))).join(",") + "\r\n").join("");

/** How many cells a spreadsheet may take for formulas: a key is written as it is, so this can only be told. */
export const risky = (rows) => rows.flat().filter((each) => /^[=+\-@\t\r]/.test(String(each))).length;

/** Let the browser keep rows as a file. */
export function download(name, rows) {
  const address = URL.createObjectURL(new Blob([toCsv(rows)], { type: "text/csv" }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
