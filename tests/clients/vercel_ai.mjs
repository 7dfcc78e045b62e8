// The Vercel AI SDK. Prints what it got as one JSON object. Run by `test_clients`.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "antiphon", baseURL: url, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true });
const common = { model: provider(name), prompt: "What is 12 + 7?", temperature: 0, maxOutputTokens: 240, maxRetries: 0 };
const tools = { get_weather: tool({ description: "The weather", inputSchema: z.object({ city: z.string().max(12) }) }) };

const whole = await generateText(common);
let streamed = "";
const stream = streamText(common);
for await (const piece of stream.textStream) streamed += piece;
const parsed = await generateObject({ ...common, schema: z.object({ kind: z.boolean(), mood: z.enum(["good", "bad"]) }) });
const called = await generateText({ ...common, tools, toolChoice: "required" });
const calling = streamText({ ...common, tools, toolChoice: "required" });
const streamedCalls = await calling.toolCalls;
console.log(JSON.stringify({
  whole: whole.text, usage: whole.usage.outputTokens, streamed, streamed_usage: (await stream.usage).outputTokens,
  parsed: ["good", "bad"].includes(parsed.object.mood), call: called.toolCalls[0].toolName,
  arguments: Object.keys(called.toolCalls[0].input).sort(), streamed_call: streamedCalls[0].toolName,
}));
