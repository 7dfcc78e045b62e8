// OpenAI's client for Node. Prints what it got as one JSON object. Run by `test_clients`.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is 12 + 7?" }];
const common = { model, messages, temperature: 0, max_tokens: 240 };
const tools = [{ type: "function", function: { name: "get_weather",
  parameters: { type: "object", properties: { city: { type: "string", maxLength: 12 } }, required: ["city"], additionalProperties: false } } }];
const Answer = z.object({ kind: z.boolean(), mood: z.enum(["good", "bad"]) });

const whole = await client.chat.completions.create(common);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...common, stream: true })) streamed += chunk.choices[0]?.delta?.content || "";
const parsed = await client.chat.completions.parse({ ...common, response_format: zodResponseFormat(Answer, "answer") });
const called = await client.chat.completions.create({ ...common, tools, tool_choice: "required" });
const runner = client.chat.completions.stream({ ...common, tools, tool_choice: "required" });
const streamedCall = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0];
const response = await client.responses.create({ model, input: "What is 12 + 7?", temperature: 0 });
let responseStreamed = "", last = "";
for await (const event of await client.responses.create({ model, input: "What is 12 + 7?", temperature: 0, stream: true })) {
  if (event.type === "response.output_text.delta") responseStreamed += event.delta;
  last = event.type;
}
const call = called.choices[0].message.tool_calls[0].function;
console.log(JSON.stringify({
  whole: whole.choices[0].message.content, usage: whole.usage.completion_tokens, streamed,
  parsed: ["good", "bad"].includes(parsed.choices[0].message.parsed.mood),
  call: call.name, arguments: Object.keys(JSON.parse(call.arguments)).sort(), streamed_call: streamedCall.function.name,
  response: response.output_text, response_streamed: responseStreamed, last_event: last,
}));
