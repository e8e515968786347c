"use strict";
// What a prediction would save, replayed in the page: a simple form of the drafter's policy.
//
// It is told what the model writes (`after`) and plays the engine: in each pass it drafts from the prediction
// (`before`) or from the output so far, and the pass confirms the drafts that are right and writes one token more.
//
// What gpu_align has and this has not: survival tables that decide how much to draft, the alignment by longest
// common subsequence, edits that are repeated, recipes, the prompt as a source, and the model's own tokenizer.

// Words with one leading mark or space, numbers by three digits, punctuation, white space.
const PIECES = /[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+/gu;
const END = "<end>";
const MAX_MATCHED = 32; // tokens compared backwards from a place
const DRAFT_PER_MATCHED = 2; // drafts for each token that is the same before a place

function tokenize(text) {
  return text.match(PIECES) || [];
}

/** Remember that `position` comes after `token`. */
function remember(places, token, position) {
  if (places.has(token)) places.get(token).push(position);
  else places.set(token, [position]);
}

/** How many of the last tokens of output[0 .. end) are the same before `position` of `text`. */
function countMatched(text, position, output, end) {
  let matched = 0;
  const most = Math.min(MAX_MATCHED, position, end);
  while (matched < most && text[position - 1 - matched] === output[end - 1 - matched]) matched += 1;
  return matched;
}

/** Replay `after` with `before` as its prediction. Returns a run as the step viewer takes it. */
function replay(before, after, numDraftTokens) {
  const prediction = tokenize(before);
  const output = [...tokenize(after), END];
  const inPrediction = new Map();
  prediction.forEach((token, index) => remember(inPrediction, token, index + 1));
  const inOutput = new Map();
  const steps = [];
  let done = 0;
  let cursor = 0;
  let follows = true; // the output so far is the beginning of the prediction

  function choose() {
    if (follows) return { source: "prediction", text: prediction, position: done, matched: done };
    let best = null;
    const consider = (source, text, position) => {
      const matched = countMatched(text, position, output, done);
      const distance = source === "prediction" ? Math.abs(position - cursor) : Infinity;
      // The longest match wins; of equal ones the prediction, there the place nearest to the cursor.
      if (!best || matched > best.matched || (matched === best.matched && distance < best.distance))
        best = { source, text, position, matched, distance };
    };
    const last = output[done - 1];
    for (const position of inPrediction.get(last) || []) consider("prediction", prediction, position);
    for (const position of inOutput.get(last) || [])
      if (position < done) consider("context", output, position);
    return best;
  }

  function explain(place) {
    if (!place) return "the last token occurs nowhere before";
    if (follows) return "the output so far is the beginning of the prediction";
    const words = place.matched > 1 ? `the last ${place.matched} tokens occur` : "the last token occurs";
    if (place.source === "context") return `${words} earlier in the output`;
    const ahead = place.position - cursor;
    const where = ahead ? `${Math.abs(ahead)} ${ahead > 0 ? "ahead of" : "behind"} the cursor` : "at the cursor";
    return `${words} in the prediction, ${where}`;
  }

  while (done < output.length) {
    // The first pass reads the prompt: the engine has no drafts for it.
    const place = steps.length ? choose() : null;
    const why = steps.length ? explain(place) : "";
    let proposed = [];
    if (place) {
      const length = follows ? numDraftTokens : Math.min(numDraftTokens, DRAFT_PER_MATCHED * place.matched);
      const end = place.source === "context" ? Math.min(place.position + length, done) : place.position + length;
      proposed = place.text.slice(place.position, end);
    }
    let accepted = 0;
    while (accepted < proposed.length && proposed[accepted] === output[done + accepted]) accepted += 1;
    const count = Math.min(accepted + 1, output.length - done);
    const cursorBefore = cursor;
    if (place && place.source === "prediction") cursor = place.position + accepted;
    for (let i = done; i < done + count; i += 1) {
      follows = follows && prediction[i] === output[i];
      remember(inOutput, output[i], i + 1);
    }
    if (prediction[cursor] === output[done + count - 1]) cursor += 1;
    steps.push({
      count, accepted, proposed, why,
      source: proposed.length ? place.source : "none",
      verified: proposed.length,
      cursor: [cursorBefore, cursor],
      position: proposed.length ? place.position : null,
      matched: place ? place.matched : 0,
    });
    done += count;
  }
  return { name: "yours", prediction, prompt: [], output, steps };
}
