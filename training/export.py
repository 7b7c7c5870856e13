"""Writes a checkpoint as a GGUF file (qwen3moe architecture) with 16-bit or 32-bit weights, tokenizer included.

llama-quantize makes the shipped file from it; see README.md.
"""
import argparse
import json
from pathlib import Path

import gguf
import numpy as np

from data import END_OF_TEXT
from model import Config
from train import load_checkpoint

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
LICENCES = "Weights: MIT. Training texts: public domain, PSF-2.0, BSD-3-Clause, GPL and the manual pages' own free " \
           "licences; see training/README.md."

# name in the checkpoint -> name in llama.cpp; a projection is stored (in, out) here and (out, in) there
MATRICES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "router": "ffn_gate_inp",
            "gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}
NORMS = {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "attn_norm": "attn_norm", "ffn_norm": "ffn_norm"}


def add_metadata(writer: gguf.GGUFWriter, config: Config, context_length: int, tokens_seen: int) -> None:
    c = config
    writer.add_name("moe-hot small")
    writer.add_description(f"Small mixture-of-experts base model trained from scratch on {tokens_seen} tokens of "
                           "English prose, Python source code and manual pages, for the tests of moe-hot. " + LICENCES)
    writer.add_license("mit")
    writer.add_context_length(context_length)
    writer.add_embedding_length(c.d_model)
    writer.add_block_count(c.layers)
    writer.add_feed_forward_length(c.expert_ff * c.top_k)
    writer.add_expert_feed_forward_length(c.expert_ff)
    writer.add_expert_count(c.experts)
    writer.add_expert_used_count(c.top_k)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_freq_base(c.rope_base)
    writer.add_layer_norm_rms_eps(c.norm_eps)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer_file: Path) -> None:
    model = json.loads(tokenizer_file.read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    end = model["vocab"][END_OF_TEXT]
    types = [gguf.TokenType.CONTROL if number == end else gguf.TokenType.NORMAL for number in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_tensors(writer: gguf.GGUFWriter, params: dict, matrix_type) -> None:
    writer.add_tensor("token_embd.weight", np.asarray(params["embedding"]).astype(matrix_type))
    writer.add_tensor("output_norm.weight", np.asarray(params["out_norm"]))
    for number, layer in enumerate(params["layers"]):
        for ours, theirs in NORMS.items():
            writer.add_tensor(f"blk.{number}.{theirs}.weight", np.asarray(layer[ours]))
        for ours, theirs in MATRICES.items():
            kept = np.float32 if ours == "router" else matrix_type
            matrix = np.ascontiguousarray(np.swapaxes(np.asarray(layer[ours]), -1, -2)).astype(kept)
            writer.add_tensor(f"blk.{number}.{theirs}.weight", matrix)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder with checkpoint.pkl and config.json")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json from data.py")
    parser.add_argument("--type", choices=("f16", "f32"), default="f16")
    parser.add_argument("--context-length", type=int, default=2048,
                        help="written to the file; longer than the trained one, README.md has the perplexities")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    settings = json.loads((options.run / "config.json").read_text())
    checkpoint = load_checkpoint(options.run / "checkpoint.pkl")
    writer = gguf.GGUFWriter(options.out, "qwen3moe")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if options.type == "f16" else gguf.LlamaFileType.ALL_F32)
    tokens_seen = checkpoint["step"] * settings["tokens_per_step"]
    add_metadata(writer, Config(**settings["model"]), options.context_length, tokens_seen)
    add_tokenizer(writer, options.tokenizer)
    add_tensors(writer, checkpoint["params"], np.float16 if options.type == "f16" else np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
