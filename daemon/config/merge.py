"""Defaults under a server: a deep merge of nodes, so that each value keeps the place it was written at."""

from __future__ import annotations

from dataclasses import replace

from daemon.config.yaml_nodes import Block, Entry

# A key that a server writes itself drops these inherited ones: they would win over it, or belong to
# the policy that it replaces.
_DROPPED_BY = {
    "policy": frozenset({"mode", "k", "v", "cache_type_k", "cache_type_v", "layers"}),
    "mode": frozenset({"k", "v", "cache_type_k", "cache_type_v"}),
    "k": frozenset({"cache_type_k"}),
    "v": frozenset({"cache_type_v"}),
}


def under(defaults: Block | None, own: Block) -> Block:
    """Return *own* with *defaults* beneath it: blocks merge, lists and scalars replace."""
    if defaults is None:
        return own
    entries = dict(defaults.entries)
    for name, entry in own.entries.items():
        below = entries.get(name)
        if below is None or not isinstance(entry.node, Block) or not isinstance(below.node, Block):
            entries[name] = entry
        else:
            inherited = _inherited_kv(below.node, entry.node) if name == "kv" else below.node
            entries[name] = Entry(entry.place, under(inherited, entry.node))
    return replace(own, entries=entries)


def _inherited_kv(defaults: Block, own: Block) -> Block:
    dropped = frozenset().union(*(_DROPPED_BY.get(name, frozenset()) for name in own.entries))
    kept = {name: entry for name, entry in defaults.entries.items() if name not in dropped}
    return replace(defaults, entries=kept)
