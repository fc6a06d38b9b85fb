"""The prefix hashes of Mooncake-like rows: one id per block of the prompt, the last block perhaps part-filled."""

from typing import Any

from serving.traces import PrefixHashes
from serving.traces._rows import id_list


def whole_prompt(row: dict[str, Any], prompt_tokens: int, block_tokens: int) -> PrefixHashes:
    """row["hash_ids"], which must be ceil(prompt_tokens / block_tokens) ids."""
    ids = id_list(row, "hash_ids")
    need = -(-prompt_tokens // block_tokens)
    if len(ids) == need:
        return PrefixHashes(ids, block_tokens, prompt_tokens)
    fits = [one for one in (16, 32, 64, 128, 256, 512, 1024) if len(ids) == -(-prompt_tokens // one)]
    hint = f"; {len(ids)} would fit blocks of {fits[0]} (--hash-block-tokens {fits[0]})" if fits else ""
    raise ValueError(
        f"hash_ids has {len(ids)} ids, {prompt_tokens} tokens need {need} (one per block of {block_tokens}){hint}"
    )
