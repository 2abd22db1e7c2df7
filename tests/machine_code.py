"""Finds registers that compiled code overwrites before an instruction has read them.

Loads, stores and special functions read their registers late, and say so on one of six barriers;
who writes such a register next has to wait for that barrier. Each instruction of 128 bits carries
the barriers that it waits for, bits 116 to 121, and the one on which it says that it has read, bits
113 to 115 (Jia et al. 2018, arXiv:1804.06826). Instructions of one queue read in their
order, so among them nobody has to wait.
"""

import re

LINE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?(\S+) ?([^;]*);.*\n\s+/\* 0x([0-9a-f]{16}) \*/"
)
MEMORY = ("LD", "ST", "SHFL", "RED", "ATOM")
OTHERS = ("BAR", "BRA", "BSSY", "BSYNC", "CALL", "DEPBAR", "EXIT", "FENCE", "LDGDEPBAR", "LDGSTS",
          "MEMBAR", "NOP", "RET", "ST", "WARPGROUP", "RED.")  # fmt: skip
"""Instructions without a register of 32 bits as their result."""


def queue(name: str) -> str:
    return "memory" if name.startswith(MEMORY) else name.split(".")[0]


def registers(name: str, operand: str, stored: bool) -> set[int]:
    """Numbers of the registers of an operand. stored: its width is that of the instruction."""
    wide = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    if accumulators := re.match(r"HGMMA\.64x(\d+)", name):
        wide = int(accumulators[1]) // 2
    found = set()
    for first, pair in re.findall(r"\bR(\d+)(\.64)?", operand):
        width = wide if stored else 2 if pair else 1
        found |= set(range(int(first), int(first) + width))
    return found


def overwritten(sass: str) -> list[tuple[str, str]]:
    """(who reads, who writes too early), with their addresses, of `cuobjdump -sass`. What is
    pending at a branch is not followed."""
    pending, found = {}, []
    for address, name, rest, control in LINE.findall(sass):
        bits = int(control, 16)
        waits, reads_on = bits >> 52 & 0x3F, bits >> 49 & 7
        operands = [x.strip() for x in rest.split(",")]
        text = f"{address} {name} {rest.strip()}"
        pending = {r: at for r, at in pending.items() if not waits >> at[0] & 1}
        result = operands[name.startswith("SHFL")]
        written = set() if name.startswith(OTHERS) else registers(name, result, True)
        for r in sorted(written & pending.keys()):
            _, kind, reader = pending.pop(r)
            if kind != queue(name):
                found.append((reader, text))
        if name.startswith(("BRA", "BSYNC", "CALL", "EXIT", "RET")):
            pending = {}
        elif reads_on < 6:
            for i, operand in enumerate(operands[not name.startswith(OTHERS) :]):
                value = name.startswith("ST") and i == 1
                for r in registers(name, operand, value):
                    pending[r] = reads_on, queue(name), text
    return found
