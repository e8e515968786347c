// Vercel's AI SDK: whole and streaming. `providerOptions` under the provider's name go into the body as they are.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const provider = createOpenAICompatible({
  name: "vllm",
  baseURL: process.env.OPENAI_BASE_URL ?? "http://localhost:8000/v1",
  apiKey: process.env.OPENAI_API_KEY ?? "none",
});
const request = {
  model: provider(process.env.MODEL ?? "tiny"),
  prompt: process.env.QUESTION ?? "w5 w17 w201 w33 w8 w90",
  temperature: 0,
  maxOutputTokens: 60,
};

const plain = await generateText(request);
const providerOptions = { vllm: { prediction: { type: "content", content: plain.text } } };

const hinted = await generateText({ ...request, providerOptions });
console.log("ai-sdk", hinted.response.id, hinted.text === plain.text);

const stream = streamText({ ...request, providerOptions });
console.log("ai-sdk-stream", (await stream.response).id, (await stream.text) === plain.text);
