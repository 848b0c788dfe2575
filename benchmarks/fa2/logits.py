"""Whether transformers answers the same with the wheel as with its other attention, on a small random model; one line of JSON.

usage: logits.py    (the unpacked wheel on PYTHONPATH, transformers installed, a GPU)
"""

import json

import flash_attn.flash_attn_interface as interface
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
TOKENS, ANSWER = 700, 48


class Counted:
    """A module whose functions are counted."""

    def __init__(self, module: object) -> None:
        self.module, self.calls = module, dict[str, int]()

    def __getattr__(self, name: str) -> object:
        self.calls[name] = self.calls.get(name, 0) + 1
        return getattr(self.module, name)


def model(attention: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(CONFIG).to("cuda", torch.bfloat16).to(dtype).eval()
    made.set_attn_implementation(attention)
    return made


def main() -> None:
    counted = Counted(interface.flash_attn_gpu)
    interface.flash_attn_gpu = counted
    torch.manual_seed(1)
    tokens = torch.randint(0, CONFIG.vocab_size, (3, TOKENS), device="cuda")
    mask = torch.ones_like(tokens)
    mask[1, :123] = 0
    truth = None
    told = {"torch": torch.__version__, "transformers": transformers.__version__, "flash_attn": interface.__file__}
    for attention, dtype in KINDS:
        made = model(attention, dtype)
        with torch.inference_mode():
            logits = made(tokens, attention_mask=mask).logits.float()[mask.bool()]
            answers = made.generate(tokens, attention_mask=mask, max_new_tokens=ANSWER, do_sample=False, pad_token_id=0)[:, TOKENS:]
        if truth is None:
            truth = logits, answers
        told[f"{attention} {str(dtype).removeprefix('torch.')}"] = {
            "largest error of a logit": (logits - truth[0]).abs().max().item(),
            "same first token": (logits.argmax(-1) == truth[0].argmax(-1)).float().mean().item(),
            "same greedy answer": (answers == truth[1]).float().mean().item(),
        }
    told["scale of the logits"] = truth[0].abs().max().item()
    told["calls"] = counted.calls
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
