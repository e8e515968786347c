// node-llama-cpp's input lookup on a GGUF: stdin has {gguf, prompts: [[token id]], maxTokens}, stdout the answers.
import {readFileSync} from "node:fs";
import {getLlama, InputLookupTokenPredictor} from "node-llama-cpp";

const {gguf, prompts, maxTokens} = JSON.parse(readFileSync(0, "utf8"));
// The settings of the guide's example, the defaults, and no predictor.
const settings = {none: null, example: {patternLength: {min: 2}, predictionLength: {max: 2}}, defaults: {}};
const llama = await getLlama({gpu: false, build: "never", maxThreads: 1, progressLogs: false, logLevel: "error"});
const model = await llama.loadModel({modelPath: gguf, gpuLayers: 0});
const answers = [];
for (const prompt of prompts) {
    const found = {};
    for (const [name, options] of Object.entries(settings)) {
        const predictor = options == null ? undefined : new InputLookupTokenPredictor(options);
        predictor?.updateInputTokens(prompt);
        const context = await model.createContext({contextSize: 2048, threads: 1, flashAttention: false});
        const sequence = context.getSequence({tokenPredictor: predictor});
        const tokens = [], before = process.cpuUsage();
        for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
            tokens.push(token);
            if (tokens.length >= maxTokens || model.isEogToken(token))
                break;
        }
        const {user, system} = process.cpuUsage(before), {validated, refuted} = sequence.tokenPredictions;
        found[name] = {tokens, predictions: [validated, refuted], cpuS: (user + system) / 1e6};
        await context.dispose();
    }
    answers.push(found);
}
console.log(JSON.stringify(answers));
process.exit(0);
