"""TorchRef 0.7's start, before its refinement: the same tables of restraints in less time.

A function has the arguments and results of TorchRef's, and may take TorchRef's own as `theirs`. It
returns NotImplemented where it can't serve the call; TorchRef's own does then.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import fusedops._frame.needs_torch  # noqa: F401

import numpy as np
import torch

from fusedops._frame.bridge.modes import has_tangent
from fusedops.compat._refinement import asked_for_torch


def _of(module: str) -> Any:
    """Return a module of TorchRef, which is loaded when its functions are called."""
    return sys.modules[f"torchref.{module}"]


def parse_loop(reader: Any, lines: list[str], start_idx: int) -> Any:
    """Read a loop of a CIF without texts in semicolons, and return the index of the next line."""
    columns: list[str] = []
    values: list[str] = []
    end = len(lines)
    for at in range(start_idx, end):
        line = lines[at].strip()
        if not line or line[0] == "#":
            continue
        if line[0] == "_" and not values:
            columns.append(line)
        elif line.startswith(("_", "loop_", "data_")):
            end = at
            break
        elif lines[at][0] == ";" or not columns:
            return NotImplemented
        else:
            quoted = "'" in line or '"' in line
            values += reader._tokenize_line(line) if quoted else line.split()
    if values:
        if len(values) % len(columns):
            return NotImplemented
        rows = np.array(values, object).reshape(-1, len(columns))
        category = reader._extract_category(columns[0])
        if category:
            table = _of("io.cif_readers").pd.DataFrame(rows, columns=columns)
            reader.data[category] = reader._merge_category(category, table)
    return end


class _Read(Mapping[str, Any]):
    """Tables by name, each read when it is first asked for: a model needs few of a library's."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Any]) -> None:
        self._names, self._read = dict.fromkeys(names), functools.cache(read)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _tables(text: str, sections: dict[str, str], standardize: Callable[..., Any]) -> Any:
    """Return the tables of a block of TorchRef's library, by section."""
    readers = _of("io.cif_readers")
    data, found = readers.CIFReader.from_string(text).data, {}
    for category, section in sections.items():
        if category in data:
            table = readers._category_table(data, category).copy()
            table.columns = [name.split(".")[-1] for name in table.columns]
            found[section] = standardize(table, section)
    return found


def _tags(category: str, **names: str) -> tuple[str, dict[str, list[str]]]:
    """Return a category of CIF, and the tags of each column of its table, the best one first."""
    return f"_{category}", {
        name: [f"_{category}.{tag}" for tag in tags.split()] for name, tags in names.items()
    }


_ATOMS = {f"atom{k}": f"atom_id_{k}" for k in (1, 2, 3, 4)}
_TWO, _THREE = ({name: _ATOMS[name] for name in [*_ATOMS][:n]} for n in (2, 3))
_ANGLE = {"value": "value_angle", "sigma": "value_angle_esd"}
_OF_MONOMERS = {
    "bonds": _tags(
        "chem_comp_bond",
        **_TWO,
        value="value_dist",
        sigma="value_dist_esd",
        order="type value_order",
        aromatic="aromatic pdbx_aromatic_flag",
    ),
    "angles": _tags("chem_comp_angle", **_THREE, **_ANGLE),
    "torsions": _tags("chem_comp_tor", id="id", **_ATOMS, **_ANGLE, periodicity="period"),
    "planes": _tags("chem_comp_plane_atom", atom="atom_id", plane_id="plane_id", sigma="dist_esd"),
    "chirals": _tags(
        "chem_comp_chir", atom_centre="atom_id_centre", **_THREE, volume_sign="volume_sign"
    ),
    "atoms": _tags(
        "chem_comp_atom",
        atom_id="atom_id",
        type_symbol="type_symbol",
        charge="charge",
        type_energy="type_energy",
        **{x: f"pdbx_model_Cartn_{x}_ideal {x}" for x in "xyz"},
    ),
}
_NUMBERS = {"value", "sigma", "periodicity", "charge", *"xyz"}


def get_compound_restraints(reader: Any, comp_id: str) -> Any:
    """Return the tables of a monomer's restraints, each made at once of all its columns."""
    theirs, tables = _of("io.cif_readers"), {}
    pd = theirs.pd
    for section, (category, columns) in _OF_MONOMERS.items():
        table = theirs._category_table(reader.cif.data, category[1:])
        ids = table.get(f"{category}.comp_id")
        if ids is None or not (ids.to_numpy() == comp_id).all():
            table = reader._filter_by_comp(table, comp_id)
        if table.empty:
            tables[section] = getattr(reader, f"_standardize_{section}")(table)
            continue
        found: dict[str, Any] = {}
        for name, tags in columns.items():
            tag = next((tag for tag in tags if tag in table), None)
            if tag is None and name in "xyz":
                continue
            column = np.full(len(table), None) if tag is None else table[tag].to_numpy()
            found[name] = pd.to_numeric(column, errors="coerce") if name in _NUMBERS else column
        if section == "bonds":
            order, flag = (
                [str(x).strip().lower() for x in found[k]] for k in ("order", "aromatic")
            )
            found["order"] = [theirs._BOND_ORDERS.get(x, "") for x in order]
            found["aromatic"] = [
                x == "y" or y == "aromatic" for x, y in zip(flag, found["order"], strict=True)
            ]
        elif section == "planes":
            sigma = pd.Series(found["sigma"]).fillna(theirs.DEFAULT_PLANE_SIGMA)
            found["sigma"] = sigma.clip(lower=0.001)
        elif section == "atoms":
            kinds = found["type_energy"]
            known = f"{category}.type_energy" in table
            found["type_energy"] = [str(x).strip() for x in kinds] if known else ""
        tables[section] = pd.DataFrame(found)
    return tables


@functools.cache
def _table_of_dicts() -> Any:
    """Return pandas' table with rows that are dicts, made in a fraction of the time of Series."""
    frame: Any = _of("io.cif_readers").pd.DataFrame

    class Table(frame):
        @property
        def _constructor(self) -> Any:
            return Table

        def iterrows(self) -> Iterator[tuple[Any, dict[str, Any]]]:
            names = list(self)
            for index, row in zip(self.index, self.to_numpy(), strict=True):
                yield index, dict(zip(names, row, strict=True))

    return Table


def apply_section(target: Any, mod_rows: Any, section: str, *, theirs: Any) -> Any:
    """Return a table of restraints with the rows of a modification."""
    table = _table_of_dicts()
    return _of("io.cif_readers").pd.DataFrame(theirs(table(target), table(mod_rows), section))


def dataframe_to_gemmi_structure(df: Any, cell: Any, spacegroup: Any, *, theirs: Any) -> Any:
    """Return gemmi's structure of a table of atoms."""
    return theirs(_table_of_dicts()(df), cell, spacegroup)


_OF_LINKS = {
    "chem_link_bond": "bonds",
    "chem_link_angle": "angles",
    "chem_link_tor": "torsions",
    "chem_link_plane": "planes",
    "chem_link_chir": "chirals",
}


def _names(blocks: Mapping[str, str], kind: str) -> list[str]:
    """Return the names of a library's blocks of a kind, but for the block that lists them."""
    names = [name.removeprefix(f"{kind}_") for name in blocks if name.startswith(f"{kind}_")]
    return [name for name in names if name != "list"]


@functools.cache
def read_link_definitions() -> Any:
    """Return TorchRef's links between monomers, and the table of their names."""
    theirs = _of("topology.monomer.cif")
    blocks = theirs.read_library_blocks()
    names = [
        name
        for name in _names(blocks, "link")
        if any(f"_{category}." in blocks[f"link_{name}"] for category in _OF_LINKS)
    ]
    table = _tables(blocks.get("link_list", ""), {"chem_link": ""}, lambda table, _: table)

    def read(name: str) -> Any:
        return _tables(blocks[f"link_{name}"], _OF_LINKS, theirs._standardize_link_columns)

    return _Read(names, read), table.get("")


@functools.cache
def read_mod_definitions() -> Any:
    """Return TorchRef's modifications of monomers."""
    theirs = _of("topology.monomer.modifications")
    blocks = theirs.read_library_blocks()

    def read(name: str) -> Any:
        sections = theirs._CATEGORY_MAP
        return _tables(blocks[f"mod_{name}"], sections, theirs._standardize_mod_columns)

    return _Read(_names(blocks, "mod"), read)


class _Site(NamedTuple):
    """An atom with riding hydrogens: its residue's template and atoms, and its neighbours."""

    info: dict[str, Any]
    present: dict[str, int]
    parent: str
    others: list[int]
    placed: list[str]


def _frames(sites: list[_Site], names: Any, xyz: Any) -> list[tuple[int, Any]]:
    """Return the third atom of each site's frame and the directions of its hydrogens in it.

    Frames are TorchRef's `_template_frame`, made once for a kind of residue, and those of the model
    are looked at together. A site without a frame has -1 and zeros.
    """
    found = [(-1, np.zeros((len(site.placed), 3))) for site in sites]
    at, atoms, kept = [], [], {}
    for n, site in enumerate(sites):
        if len(site.others) != 1:
            continue
        (neighbour,), info, present = site.others, site.info, site.present
        name = names[neighbour]
        beside = info["heavy_adjacency"].get(name, [])
        thirds = [present[x] for x in beside if x != site.parent and x in present]
        if present.get(name) != neighbour or not thirds:
            continue
        third = min(thirds)
        frame, hydrogens = (site.parent, name, names[third]), tuple(site.placed)
        key = id(info), frame, hydrogens
        if key not in kept:
            kept[key] = _in_template(info, frame, hydrogens)
        directions = kept[key]
        if directions is not None:
            found[n] = third, directions.numpy()
            at.append(n)
            atoms.append((present[site.parent], neighbour, third))
    if at:
        frames = xyz[np.array(atoms)]
        model = torch.as_tensor(frames - frames[:, :1], dtype=_of("config").get_float_dtype())
        degenerate = _of("base.coordinates.local_frame").frame_is_degenerate(*model.unbind(1))
        for n in np.array(at)[degenerate.numpy()]:
            found[n] = -1, np.zeros((len(sites[n].placed), 3))
    return found


def _in_template(info: dict[str, Any], frame: tuple[str, ...], hydrogens: tuple[str, ...]) -> Any:
    """Return the directions of a template's hydrogens in a frame, or None."""
    index, coords = info["id_to_index"], info["coords"]
    if any([name not in index for name in (*frame, *hydrogens)]):
        return None
    points, ends = (np.stack([coords[index[x]] for x in some]) for some in (frame, hydrogens))
    planar = bool(info["planar_h"] & set(hydrogens))
    return _of("topology.hydrogens")._frame_directions(points, ends, planar)


def build_hydrogen_topology(
    pdb: Any, device: Any = None, verbose: int = 0, cif_dict: Any = None
) -> Any:
    """Return riding hydrogens, whose parents' neighbours are found by one tree of all atoms."""
    from scipy.spatial import cKDTree

    theirs, templates = _of("topology.riding"), _of("topology.hydrogens")
    xyz = pdb[["x", "y", "z"]].to_numpy(np.float64)
    if cif_dict is None or not np.isfinite(xyz).all():
        return NotImplemented
    names, elements, kinds = (
        pdb[name].astype(str).str.strip().to_numpy() for name in ("name", "element", "resname")
    )
    a, b = cKDTree(xyz).query_pairs(2.0, output_type="ndarray").T
    a, b = np.concatenate([a, b]), np.concatenate([b, a])
    square = ((xyz[a] - xyz[b]) ** 2).sum(1)
    heavy = np.array([element.upper() != "H" for element in elements])
    near = (square > 0.09) & (square < 3.61) & heavy[b]
    a, b = a[near], b[near]
    bonded = np.split(b[np.lexsort((b, a))], np.cumsum(np.bincount(a, minlength=len(xyz)))[:-1])

    residue = [pdb[name].to_numpy() for name in ("chainid", "resseq", "icode", "resname")]
    first = np.flatnonzero(np.any([x[1:] != x[:-1] for x in residue], 0)) + 1
    known = {kind: templates._template(cif_dict, kind) for kind in dict.fromkeys(kinds)}
    sites = []
    for low, high in zip([0, *first], [*first, len(xyz)], strict=True):
        info = known[kinds[low]]
        if info is None:
            continue
        present: dict[str, int] = {}
        for atom in range(low, high):
            present.setdefault(names[atom], atom)
        missing: dict[str, list[str]] = {}
        for hydrogen in info["h_names"]:
            parent = info["parent_of"].get(hydrogen)
            if hydrogen not in present and parent in present:
                missing.setdefault(parent, []).append(hydrogen)
        for parent, absent in missing.items():
            others = bonded[present[parent]].tolist()
            element = info["elements"][info["id_to_index"][parent]].upper()
            room = templates.STANDARD_VALENCE.get(element, 4) - len(others)
            placed = sorted(absent)[: max(0, room)]
            if placed:
                sites.append(_Site(info, present, parent, others, placed))
    rows = []
    for site, (atom, directions) in zip(sites, _frames(sites, names, xyz), strict=True):
        count = min(len(site.others), theirs.MAX_HEAVY_NB)
        padded = [*site.others[:count], *[-1] * (theirs.MAX_HEAVY_NB - count)]
        for slot, hydrogen in enumerate(site.placed):
            kind = theirs._classify_placement(len(site.placed), len(site.others), slot)
            length = site.info["ideal_length"].get(hydrogen, 0.97)
            place = site.present[site.parent], kind, slot, padded, count, atom
            if kind >= 0:
                rows.append((*place, length, directions[slot]))
    if not rows:
        return NotImplemented
    rows.sort(key=lambda row: row[1])
    found = theirs.HydrogenTopology(device=device)
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    for name, column in zip(_OF_HYDROGENS, columns, strict=True):
        whole = column.dtype.kind == "i"
        dtype = theirs.get_int_dtype() if whole else theirs.dtypes.float
        setattr(found, name, torch.tensor(column, dtype=dtype, device=found.device))
    found.h_vdw_radius = torch.full_like(found.h_bond_length, 1.2)
    ends = np.searchsorted(columns[1], range(8)).tolist()
    found.type_bounds = {k: (ends[k], ends[k + 1]) for k in range(7) if ends[k] < ends[k + 1]}
    if verbose > 0:
        print(f"  Hydrogen topology: {len(rows)} riding H atoms")
    return found


#: The fields of TorchRef's topology of hydrogens, in the order of the rows above.
_OF_HYDROGENS = (
    "h_parent_idx",
    "h_placement_type",
    "h_slot_in_parent",
    "parent_neighbor_idx",
    "parent_neighbor_count",
    "h_frame_atom",
    "h_bond_length",
    "h_frame_direction",
)


def build_h_candidate_pairs(
    h_topo: Any, vdw_data: Any, pdb: Any, h_excl_hash: Any, device: Any = None, verbose: int = 0
) -> Any:
    """Set the contacts of riding hydrogens, which are near where their parents are."""
    theirs, atoms = _of("topology.riding"), len(pdb)
    device = theirs.resolve_device(h_topo, device=device)
    nodes = theirs.build_residue_nodes(
        *(pdb[name].values for name in ("chainid", "resseq", "icode", "resname"))
    )
    residue = np.repeat(np.arange(len(nodes["chain"])), nodes["atom_end"] - nodes["atom_start"])
    names = "indices", "symop_indices", "cell_offsets"
    indices, symop, offset = (vdw_data[name].cpu().numpy() for name in names)
    image = (symop != 0) | (offset != 0).any(1)
    apart = image | (residue[indices[:, 0]] != residue[indices[:, 1]])
    if not h_topo.n_hydrogens or not apart.any():
        return NotImplemented
    (first, second), symop = indices[apart].T, symop[apart]
    offset, image = offset[apart], image[apart]
    parents = h_topo.h_parent_idx.cpu().numpy()
    # The hydrogens of an atom are a stretch of this order.
    order, count = np.argsort(parents, kind="stable"), np.bincount(parents, minlength=atoms)
    start = np.cumsum(count) - count

    def spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pair of each contact, for as many contacts a pair, and its place in it."""
        pair = np.repeat(np.arange(len(counts)), counts)
        return pair, np.arange(len(pair)) - (np.cumsum(counts) - counts)[pair]

    def on(parent: np.ndarray, place: np.ndarray) -> np.ndarray:
        return atoms + order[start[parent] + place]

    a, k = spread(count[first])
    b, m = spread(np.where(image, 0, count[second]))
    c, n = spread(count[first] * count[second])
    n, p = np.divmod(n, count[second[c]])
    pair = np.concatenate([a, b, c])
    i = np.concatenate([on(first[a], k), on(second[b], m), on(first[c], n)])
    j = np.concatenate([second[a], first[b], on(second[c], p)])
    low, high = offset.min(0), offset.max(0)
    move = np.ravel_multi_index((offset - low).T, tuple(high - low + 1))
    sizes = atoms + h_topo.n_hydrogens, symop.max() + 1, move.max() + 1
    taken = np.argsort(pair, kind="stable")
    if h_excl_hash is not None and len(h_excl_hash):
        code = np.minimum(i, j) * sizes[0] + np.maximum(i, j)
        excluded = h_excl_hash.cpu().numpy()
        at = np.searchsorted(excluded[:-1], code)
        bonded = ~image[pair] & (excluded[at] == code)
        taken = taken[~bonded[taken]]
    contact = i[taken], j[taken], symop[pair[taken]], move[pair[taken]]
    _, once = np.unique(np.ravel_multi_index(contact, (sizes[0], *sizes)), return_index=True)
    taken = taken[np.sort(once)]
    i, j, pair = i[taken], j[taken], pair[taken]
    if not len(pair):
        return NotImplemented

    def tensor(x: np.ndarray, dtype: Any) -> Any:
        return torch.tensor(x, dtype=dtype, device=device)

    kind, both = theirs.dtypes.float, (i >= atoms) & (j >= atoms)
    h_topo.cand_idx_i, h_topo.cand_idx_j, h_topo.cand_symop_idx, h_topo.cand_cell_offset = (
        tensor(x, theirs.get_int_dtype()) for x in (i, j, symop[pair], offset[pair])
    )
    h_topo.cand_min_dist = torch.zeros(len(pair), dtype=kind, device=device)
    weight = np.where(image[pair] & both, theirs.IMAGE_PAIR_WEIGHT, 1.0)
    h_topo.cand_weight = tensor(weight, kind)
    if verbose > 0:
        print(
            f"  H candidate pairs: {len(pair)} ({both.sum()} H-H, {(~both).sum()} H-heavy, "
            f"{image[pair].sum()} symmetry)"
        )
    return None


def find_pairs_kdtree(
    cart_pos: Any, atom_idx: Any, combo_idx: Any, cutoff: float, identity_combo: int
) -> Any:
    """Return TorchRef's contacts of atoms with images, of which only those near atoms are sorted.

    Neighbouring cells have some 30 times as many images as there are within the cutoff of a box
    around the atoms.
    """
    from scipy.spatial import cKDTree

    xyz, atoms, combos = (x.detach().cpu().numpy() for x in (cart_pos, atom_idx, combo_idx))
    if not np.isfinite(xyz).all():
        return NotImplemented
    own, near = np.flatnonzero(combos == identity_combo), np.arange(len(xyz))
    for axis in range(3):
        x, of_atoms = xyz[near, axis], xyz[own, axis].astype(np.float64)
        low, high = of_atoms.min(initial=np.inf), of_atoms.max(initial=-np.inf)
        near = near[(x >= low - cutoff) & (x <= high + cutoff)]
    quick = {"balanced_tree": False, "compact_nodes": False}
    tree, others = (cKDTree(xyz[some], **quick) for some in (own, near))
    found = tree.sparse_distance_matrix(others, cutoff, output_type="ndarray")
    found = found[found["v"] < cutoff]
    i, images = atoms[own[found["i"]]].astype(np.int64), near[found["j"]]
    j, image = atoms[images].astype(np.int64), combos[images].astype(np.int64)
    once = (image != identity_combo) | (i < j)
    contact = i[once], j[once], image[once]
    order = np.lexsort(contact[::-1])
    return tuple([torch.from_numpy(x[order]).to(cart_pos.device) for x in contact])


def log_mills_tail(t: Any) -> Any:
    """Return the logarithm of Mills' ratio from 2 on, without a continued fraction."""
    # A derivative of erfcx cancels.
    precise = t.dtype in (torch.float32, torch.float64) and t.device.type in ("cpu", "cuda")
    if asked_for_torch() or t.requires_grad or has_tangent((t,)) or not precise:
        return NotImplemented
    return torch.log(math.sqrt(math.pi / 2) * torch.special.erfcx(math.sqrt(0.5) * t))


_MONOMER = "torchref.topology.monomer"
#: Functions by the module, and the class in it, that has them, with the names of their arguments.
METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "CIFReader._parse_loop": ("torchref.io.cif_readers", parse_loop),
    "RestraintCIFReader.get_compound_restraints": (
        "torchref.io.cif_readers",
        get_compound_restraints,
    ),
    "_apply_section": (f"{_MONOMER}.modifications", apply_section),
    "dataframe_to_gemmi_structure": ("torchref.io.cif", dataframe_to_gemmi_structure),
    "read_link_definitions": ("torchref.topology.restraints", read_link_definitions),
    "read_mod_definitions": ("torchref.topology.templates", read_mod_definitions),
    "build_hydrogen_topology": ("torchref.topology.riding", build_hydrogen_topology),
    "build_h_candidate_pairs": ("torchref.topology.riding", build_h_candidate_pairs),
    "_log_mills_tail": ("torchref.base.wilson_outliers", log_mills_tail),
    "find_pairs_kdtree": ("torchref.topology.nonbonded", find_pairs_kdtree),
}
