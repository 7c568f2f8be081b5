/** Markdown as a model writes it, as nodes: paragraphs, headings, lists, tables, quotes, code, links. It is text throughout: HTML in it is
 *  shown, not parsed, and nothing is loaded. */

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( {0,9})([-*+]|\d{1,9}[.)])( {1,4})(?=\S)/;
const QUOTE = /^ {0,3}> ?/;
const COLUMNS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEP = 12; // of quotes, lists and emphasis in one another; what lies deeper is plain text

const element = (name, ...parts) => {
  const made = document.createElement(name);
  made.append(...parts);
  return made;
};

/** The nodes of a text. */
export function markdown(text) {
  const made = document.createDocumentFragment();
  made.append(...blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0));
  return made;
}

function blocks(lines, depth) {
  const made = [];
  for (let at = 0; at < lines.length; ) {
    const line = lines[at], starts = opener(lines, at, depth);
    if (!line.trim()) at++;
    else if (starts) {
      const [nodes, next] = starts(lines, at, depth);
      made.push(...nodes);
      at = next;
    } else {
      const begin = at++;
      while (at < lines.length && lines[at].trim() && !opener(lines, at, depth)) at++;
      made.push(element("p", ...inline(lines.slice(begin, at).map((l) => l.trim()).join("\n"), depth)));
    }
  }
  return made;
}

/** What begins at a line, but a paragraph. */
function opener(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return code;
  if (HEADING.test(line)) return heading;
  if (RULE.test(line)) return (_, at) => [[element("hr")], at + 1];
  if (depth < DEEP && QUOTE.test(line)) return quote;
  if (depth < DEEP && ITEM.test(line)) return list;
  if (line.includes("|") && lines[at + 1]?.includes("-") && lines[at + 1].length < 1000 && COLUMNS.test(lines[at + 1])) return table;
}

function code(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const begin = ++at;
  const ends = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  while (at < lines.length && !ends(lines[at])) at++;
  const block = element("code", lines.slice(begin, at).join("\n"));
  if (language) block.className = `language-${language}`;
  return [[Object.assign(element("pre", block), { tabIndex: 0 })], at + 1];
}

function heading(lines, at, depth) {
  const [, marks, text] = HEADING.exec(lines[at]);
  return [[element(`h${Math.min(6, marks.length + 1)}`, ...inline(text, depth))], at + 1];
}

function quote(lines, at, depth) {
  const begin = at;
  while (at < lines.length && QUOTE.test(lines[at])) at++;
  return [[element("blockquote", ...blocks(lines.slice(begin, at).map((l) => l.replace(QUOTE, "")), depth + 1))], at];
}

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]), ordered = /\d/.test(mark), kind = mark.at(-1);
  const made = element(ordered ? "ol" : "ul");
  if (ordered && parseInt(mark) !== 1) made.start = parseInt(mark);
  for (let found; at < lines.length && (found = ITEM.exec(lines[at])) && found[2].at(-1) === kind && found[1].length <= indent.length + 1; ) {
    const width = found[0].length, item = [lines[at++].slice(width)];
    const inside = (line) => line.startsWith(" ".repeat(indent.length + 2)) || (item.at(-1).trim() && line.trim() && !opener([line], 0, depth));
    while (at < lines.length && (inside(lines[at]) || (!lines[at].trim() && lines[at + 1]?.startsWith(" ".repeat(indent.length + 2))))) {
      const line = lines[at++];
      item.push(line.slice(Math.min(width, line.length - line.trimStart().length)));
    }
    const parts = blocks(item, depth + 1);
    made.append(element("li", ...(parts[0]?.tagName === "P" ? [...parts[0].childNodes, ...parts.slice(1)] : parts)));
    if (at + 1 < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1])) at++;
  }
  return [[made], at];
}

function table(lines, at, depth) {
  const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((c) => c.trim().replaceAll("\\|", "|"));
  const row = (name, line, count) => element("tr", ...cells(line).slice(0, count).map((c) => element(name, ...inline(c, depth))));
  const head = row("th", lines[at]), body = element("tbody");
  for (at += 2; at < lines.length && lines[at].includes("|"); at++) body.append(row("td", lines[at], head.childElementCount));
  const scrolls = element("div", element("table", element("thead", head), body));
  scrolls.className = "scroll";
  return [[Object.assign(scrolls, { tabIndex: 0 })], at];
}

// In this order: what is code has no marks in it. Lengths are bounded, so that no text takes more than linear time.
const INLINE = [
  [/(?<!`)(`+)(?!`)([^]{1,4000}?)(?<!`)\1(?!`)/y, ([, , text]) => element("code", text.replace(/^ (.*\S.*) $/s, "$1"))],
  [/\\([!-/:-@[-`{-~])/y, ([, sign]) => sign],
  [/\*\*(?=\S)([^]{0,2000}?\S)\*\*/y, ([, text], depth) => element("strong", ...inline(text, depth + 1))],
  [/(?<!\w)__(?=\S)([^]{0,2000}?\S)__(?!\w)/y, ([, text], depth) => element("strong", ...inline(text, depth + 1))],
  [/~~(?=\S)([^]{0,2000}?\S)~~/y, ([, text], depth) => element("s", ...inline(text, depth + 1))],
  [/\*(?=[^\s*])([^]{0,2000}?[^\s*])\*/y, ([, text], depth) => element("em", ...inline(text, depth + 1))],
  [/(?<!\w)_(?=[^\s_])([^]{0,2000}?[^\s_])_(?!\w)/y, ([, text], depth) => element("em", ...inline(text, depth + 1))],
  [/!?\[([^\]\n]{0,500})\]\(\s?<?((?:https?:\/\/|mailto:)(?:[^\s<>()]|\([^\s<>()]{0,200}\)){1,2000})>?(?: "[^"\n]{0,200}")?\s?\)/y,
    ([, text, url], depth) => link(url, text ? inline(text, depth + 1) : [url])],
  [/(?<!\w)<?(https?:\/\/[^\s<>"]{0,2000}[^\s<>".,;:!?)\]'*_])>?/y, ([, url]) => link(url, [url])],
  [/\n/y, () => element("br")],
];
const PLAIN = /[^`\\*_~![<\nh]+|[^]/y;

function inline(text, depth) {
  if (depth > DEEP) return [text];
  const made = [];
  for (let at = 0; at < text.length; ) {
    const from = (form) => ((form.lastIndex = at), form.exec(text));
    let found;
    const [, node] = INLINE.find(([form]) => (found = from(form))) ?? [];
    found ??= from(PLAIN);
    at += found[0].length;
    const next = node ? node(found, depth) : found[0];
    if (typeof next === "string" && typeof made.at(-1) === "string") made[made.length - 1] += next;
    else made.push(next);
  }
  return made;
}

function link(url, parts) {
  return Object.assign(element("a", ...parts), { href: url, rel: "noopener noreferrer", target: "_blank" });
}
