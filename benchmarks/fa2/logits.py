"""Whether transformers answers the same with the wheel as with its other attention, on a small random model; one line of JSON.

usage: logits.py    (the unpacked wheel on PYTHONPATH, transformers installed, a GPU)

Without a GPU everything but the wheel runs. Attention that is wrong on purpose, in float32, shows what the measures would see.
"""

import json

import torch
import transformers

CONFIG = transformers.LlamaConfig(
    vocab_size=2048,
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    initializer_range=0.06,
)
KINDS = (("eager", torch.float32), ("eager", torch.bfloat16), ("sdpa", torch.bfloat16), ("flash_attention_2", torch.bfloat16))
WRONG = ("no newest key", "no oldest key", "one key of the future", "scaling 1 % off", "scaling 5 % off")
TOKENS, ANSWER = 700, 48
THERE = torch.cuda.is_available()
DEVICE = "cuda" if THERE else "cpu"


class Counted:
    """A module whose functions are counted."""

    def __init__(self, module: object) -> None:
        self.module, self.calls = module, dict[str, int]()

    def __getattr__(self, name: str) -> object:
        self.calls[name] = self.calls.get(name, 0) + 1
        return getattr(self.module, name)


def model(attention: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(CONFIG).to(DEVICE, torch.bfloat16).to(dtype).eval()
    made.set_attn_implementation(attention)
    return made


def wrong(kind: str, mask: torch.Tensor) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model whose attention is wrong, by its scaling or by the mask to call it with."""
    made, i = model("eager", torch.float32), torch.arange(TOKENS, device=DEVICE)
    if kind.startswith("scaling"):
        for layer in made.model.layers:
            layer.self_attn.scaling *= 1 + int(kind.split()[1]) / 100
    query, key = i[:, None], i[None, :]
    change = {
        "no newest key": (key < query) | (query == 0),
        "no oldest key": (key > 0) | (query == 0),
    }.get(kind, key <= query)
    seen = (change & (key <= query)) | ((key == query + 1) if kind == "one key of the future" else (key < 0))
    seen = (seen & mask.bool()[:, None, :])[:, None]
    return made, torch.zeros(seen.shape, device=DEVICE).masked_fill(~seen, torch.finfo(torch.float32).min)


def errors(logits: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    return {
        "largest error of a logit": (logits - truth).abs().max().item(),
        "root mean square error": (logits - truth).square().mean().sqrt().item(),
        "same first token": (logits.argmax(-1) == truth.argmax(-1)).float().mean().item(),
    }


def main() -> None:
    told = {"torch": torch.__version__, "transformers": transformers.__version__}
    if THERE:
        import flash_attn.flash_attn_interface as interface

        counted = interface.flash_attn_gpu = Counted(interface.flash_attn_gpu)
        told |= {"flash_attn": interface.__file__, "calls": counted.calls}
    torch.manual_seed(1)
    tokens = torch.randint(0, CONFIG.vocab_size, (3, TOKENS), device=DEVICE)
    mask = torch.ones_like(tokens)
    mask[1, :123] = 0
    truth = None
    with torch.inference_mode():
        for attention, dtype in KINDS if THERE else KINDS[:-1]:
            made = model(attention, dtype)
            logits = made(tokens, attention_mask=mask).logits.float()[mask.bool()]
            answers = made.generate(tokens, attention_mask=mask, max_new_tokens=ANSWER, do_sample=False, pad_token_id=0)[:, TOKENS:]
            truth = truth or (logits, answers)
            same = {"same greedy answer": (answers == truth[1]).float().mean().item()}
            told[f"{attention} {str(dtype).removeprefix('torch.')}"] = errors(logits, truth[0]) | same
        for kind in WRONG:
            made, seen = wrong(kind, mask)
            told[f"wrong on purpose: {kind}"] = errors(made(tokens, attention_mask=seen).logits.float()[mask.bool()], truth[0])
    told["scale of the logits"] = truth[0].abs().max().item()
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
