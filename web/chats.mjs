/** What the page's engine makes of chats: {"format": {templates, tokens}, "chats": [messages, ...]} on stdin -> texts as JSON, null for errors. */
import { text } from "node:stream/consumers";
import { Chat } from "./dist/index.js";

const { format, chats } = JSON.parse(await text(process.stdin));
const rendered = (messages) => { try { return new Chat(format).render(messages); } catch { return null; } };
console.log(JSON.stringify(chats.map(rendered)));
