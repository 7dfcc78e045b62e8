// What is sent for a conversation: its messages in the form of the API, and the settings. Pure.

export const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.05], ["top_p", "Top p", 0.01, 1, 0.01], ["top_k", "Top k", 0, 1000, 1], ["min_p", "Min p", 0, 1, 0.01],
  ["max_tokens", "Max tokens", 1, 10_000_000, 1], ["seed", "Seed", 0, 2 ** 53 - 1, 1],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1], ["frequency_penalty", "Frequency penalty", -2, 2, 0.1],
  ["repetition_penalty", "Repetition penalty", 0.01, 2, 0.01],
];
export const DEFAULTS = { model: "", system: "", ...Object.fromEntries(NUMBERS.map(([name]) => [name, ""])), stop: "", thinking: "", effort: "",
  thinking_budget: "", format: "text", schema: "", tools: "", tool_choice: "auto", more: "", probabilities: true };
const SETTINGS = "antiphon-chat";

export const savedOptions = () => {
  try { return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(SETTINGS) || "{}") }; } catch { return { ...DEFAULTS }; }
};
export const saveOptions = (options) => localStorage.setItem(SETTINGS, JSON.stringify(options));

const THOUGHT = /^\s*<think(?:ing)?>([\s\S]*?)(?:<\/think(?:ing)?>|$)/;

// The thinking and the answer of a message. A server without a reasoning parser leaves the marks in the text.
export function parts({ content, reasoning = "" }) {
  const found = reasoning ? null : THOUGHT.exec(content);
  return found ? { reasoning: found[1].trim(), content: content.slice(found[0].length).trimStart() } : { reasoning, content };
}

const asked = (text, files) => [text, ...(files || []).map((one) => `File ${one.name}:\n\`\`\`\n${one.text}\n\`\`\``)].filter(Boolean).join("\n\n");

function sent(message) {
  const { role, images, files, calls, callId } = message;
  if (role === "tool") return { role, tool_call_id: callId, content: message.content };
  const content = role === "assistant" ? parts(message).content : asked(message.content, files);
  if (calls?.length) return { role, content: content || null, tool_calls: calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } })) };
  if (!images?.length) return { role, content };
  return { role, content: [...(content ? [{ type: "text", text: content }] : []), ...images.map((url) => ({ type: "image_url", image_url: { url } }))] };
}

const isEmpty = ({ role, content, calls }) => role === "assistant" && !content && !calls?.length;

// The body of the request that answers the last message of `path`. Throws an Error that names the setting that cannot be used.
export function bodyOf(options, path) {
  const turns = path.filter((one) => !isEmpty(one)).map(sent);
  const body = { messages: options.system ? [{ role: "system", content: options.system }, ...turns] : turns, stream: true, stream_options: { include_usage: true } };
  if (options.model) body.model = options.model;
  for (const [name] of NUMBERS) if (options[name] !== "") body[name] = options[name];
  const stop = options.stop.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (options.thinking) body.chat_template_kwargs = { enable_thinking: options.thinking === "on" };
  if (options.effort) body.reasoning_effort = options.effort;
  if (options.thinking_budget !== "") body.thinking_token_budget = options.thinking_budget;
  if (options.format === "json") body.response_format = { type: "json_object" };
  if (options.format === "schema") body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: json("JSON schema", options.schema) } };
  if (options.tools.trim()) Object.assign(body, { tools: json("Tools", options.tools), tool_choice: options.tool_choice });
  if (options.probabilities) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return options.more.trim() ? { ...body, ...json("More parameters", options.more) } : body;
}

function json(title, text) {
  try { return JSON.parse(text); } catch (failure) { throw new Error(`${title}: not JSON (${failure.message}).`); }
}
