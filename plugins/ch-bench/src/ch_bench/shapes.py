"""The shapes of models that are too large to be run here."""


def gpt_shapes(layers: int, width: int, vocab: int, context: int) -> dict[str, tuple[int, ...]]:
    """The parameters of a GPT-2 by name."""
    shapes: dict[str, tuple[int, ...]] = {"wte": (vocab, width), "wpe": (context, width)}
    for i in range(layers):
        shapes |= {
            f"{i}.ln1.w": (width,), f"{i}.ln1.b": (width,),
            f"{i}.attn.w": (3 * width, width), f"{i}.attn.b": (3 * width,),
            f"{i}.proj.w": (width, width), f"{i}.proj.b": (width,),
            f"{i}.ln2.w": (width,), f"{i}.ln2.b": (width,),
            f"{i}.fc.w": (4 * width, width), f"{i}.fc.b": (4 * width,),
            f"{i}.out.w": (width, 4 * width), f"{i}.out.b": (width,),
        }  # fmt: skip
    return shapes | {"lnf.w": (width,), "lnf.b": (width,)}
