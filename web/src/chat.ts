/** The model's chat template: what it makes of messages. Mirrors still_export/package/chat_format.py. */

import { Template } from "@huggingface/jinja";

export interface Message { role: string; content: string; reasoning_content?: string }
export interface Templates { templates: Record<string, string>; tokens: Record<string, string> }
export type Place = "text" | "user" | "answer";

const MARK = "\ue000\ue001"; // stands where a text is cut
const THOUGHTS = [["<think>", "</think>"], ["[THINK]", "[/THINK]"], ["<seed:think>", "</seed:think>"], ["◁think▷", "◁/think▷"]] as const;

const partsOf = (text: string) => [{ type: "text", text }];

export class Chat {
  private readonly template: Template;
  /** Whether the template takes content that is a list of parts alone. */
  private readonly parts: boolean;
  /** What stands around the model's reasoning, where its template says so. */
  readonly thoughts: readonly [string, string] | undefined;

  constructor(private readonly given: Templates) {
    const text = given.templates.default;
    if (text === undefined) throw new Error(`this model has chat templates for ${Object.keys(given.templates).join(", ")} alone.`);
    this.template = new Template(text);
    this.thoughts = THOUGHTS.find(([, end]) => text.includes(end));
    this.parts = !this.takes(MARK) && this.takes(partsOf(MARK));
  }

  render(messages: Message[]): string {
    return this.rendered(this.parts ? messages.map((message) => ({ ...message, content: partsOf(message.content) })) : messages);
  }

  private rendered(messages: object[]): string {
    return this.template.render({ ...this.given.tokens, messages, tools: null, documents: null, add_generation_prompt: true });
  }

  /** Whether a user's content of this form is part of the text, and not how the list prints. */
  private takes(content: unknown): boolean {
    try {
      const text = this.rendered([{ role: "user", content }]);
      return text.includes(MARK) && !/(["'])type\1/.test(text);
    } catch {
      return false;
    }
  }

  /** What stands before the first message of a user. */
  opening(): string {
    return this.cut([{ role: "user", content: MARK }])[0];
  }

  /** The text of a chat behind what was read before: nothing, the beginning of its first message, or an answer. */
  behind(messages: Message[], place: Place): string {
    if (place === "text") return this.render(messages);
    const [first, ...rest] = messages;
    const before = [{ role: "user", content: "." }, { role: "assistant", content: MARK }];
    return this.cut(place === "answer" ? [...before, ...messages] : [{ ...first!, content: MARK + first!.content }, ...rest])[1];
  }

  private cut(messages: Message[]): [string, string] {
    const text = this.render(messages), place = text.indexOf(MARK);
    if (place < 0) throw new Error("the chat template leaves out a message.");
    return [text.slice(0, place), text.slice(place + MARK.length)];
  }

  /** An answer as a message of later turns, its reasoning apart; `opened`: the prompt ends with what begins it. */
  message(text: string, opened: boolean): Message {
    const [begin, end] = this.thoughts ?? ["", ""], begun = text.trimStart().startsWith(begin);
    if (!begin || !(opened || begun)) return { role: "assistant", content: text };
    const place = text.indexOf(end), thought = (place < 0 ? text : text.slice(0, place)).trim();
    return {
      role: "assistant",
      content: place < 0 ? "" : text.slice(place + end.length).trimStart(),
      reasoning_content: (begun ? thought.slice(begin.length) : thought).trim(),
    };
  }

  /** Whether a prompt ends with what begins the model's reasoning. */
  opens(prompt: string): boolean {
    return Boolean(this.thoughts) && prompt.trimEnd().endsWith(this.thoughts![0]);
  }
}
