// The openai npm package: whole and streaming.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.OPENAI_BASE_URL ?? "http://localhost:8000/v1", apiKey: process.env.OPENAI_API_KEY ?? "none" });
const request = {
  model: process.env.MODEL ?? "tiny",
  messages: [{ role: "user", content: process.env.QUESTION ?? "w5 w17 w201 w33 w8 w90" }],
  temperature: 0,
  max_tokens: 60,
};

const plain = await client.chat.completions.create(request);
const answer = plain.choices[0].message.content;
const prediction = { type: "content", content: answer }; // in life: the file before the edit

const hinted = await client.chat.completions.create({ ...request, prediction });
console.log("openai", hinted.id, hinted.choices[0].message.content === answer);

let text = "";
let id;
for await (const chunk of await client.chat.completions.create({ ...request, prediction, stream: true })) {
  id = chunk.id;
  text += chunk.choices[0]?.delta?.content ?? "";
}
console.log("openai-stream", id, text === answer);

try {
  await client.chat.completions.create({ ...request, prediction: { type: "content", content: "\ud800" } });
} catch (error) {
  console.log("openai-error", error.status, error.param);
}
