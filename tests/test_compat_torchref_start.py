"""TorchRef's start: tables of monomers, links and restraints, equal to those that it makes alone.

Beside ubiquitin, the models 4CUP, 3P3W and 1EJG are compared, with alternative conformations and
hydrogens, if the folder that FUSEDOPS_DATA names has them.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.resources
import importlib.util
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchref")
pd = pytest.importorskip("pandas")

import fusedops  # noqa: E402
import fusedops.compat._start as start  # noqa: E402
import fusedops.compat.torchref as compat  # noqa: E402

with warnings.catch_warnings():
    # It warns of the threads that it takes, and of packages that it lacks.
    warnings.simplefilter("ignore")
    cif = importlib.import_module("torchref.topology.monomer.cif")
    modifications = importlib.import_module("torchref.topology.monomer.modifications")
    readers = importlib.import_module("torchref.io.cif_readers")
    restraints = importlib.import_module("torchref.topology.restraints")
    templates = importlib.import_module("torchref.topology.templates")
LIBRARY = Path(readers.__file__).parents[1] / "data/monomer_library"
MONOMERS = sorted(path for path in LIBRARY.glob("?/*.cif"))


@pytest.fixture(autouse=True)
def unregistered():
    yield
    compat.unregister()


def assert_same(ours, theirs, where=""):
    """Fail unless all that TorchRef holds is equal, in values, dtypes, order and names."""
    if isinstance(theirs, pd.DataFrame):
        pd.testing.assert_frame_equal(ours, theirs, check_exact=True, obj=where)
        kinds = [[type(x) for x in table.to_numpy(object).ravel()] for table in (ours, theirs)]
        assert kinds[0] == kinds[1], where
    elif isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype, where
        assert ours.device == theirs.device, where
        assert torch.equal(ours, theirs) or (ours.isnan() & theirs.isnan()).all(), where
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype, where
        assert np.array_equal(ours, theirs), where
    elif hasattr(theirs, "keys"):
        assert list(ours) == list(theirs), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}/{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for k, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{where}/{k}")
    elif isinstance(theirs, (int, float, str, set, type(None), torch.device, torch.dtype)):
        assert ours == theirs, where
    else:
        assert type(ours) is type(theirs), where
        held = [{k: v for k, v in vars(x).items() if k not in UNEQUAL} for x in (ours, theirs)]
        assert_same(*held, f"{where}/{type(theirs).__name__}")


#: Addresses; and the links of which a model needs few, which another test compares.
UNEQUAL = "_stamp", "link_dict"


def calls(*names):
    made = {swap.name: swap.calls for swap in fusedops.compat.swaps()}
    return [made[name] for name in names]


def read(path):
    try:
        return cif.read_cif(path)
    except ValueError as error:
        return {"error": str(error)}


@pytest.mark.parametrize("path", MONOMERS, ids=lambda path: path.stem)
def test_monomers(path):
    theirs = read(path)
    compat.register()
    assert_same(read(path), theirs)
    served = calls("CIFReader._parse_loop", "RestraintCIFReader.get_compound_restraints")
    assert min(served) > 0 or "error" in theirs


def loop(category, tags, *rows):
    return "\n".join(["loop_", *(f"_{category}.{tag}" for tag in tags.split()), *rows, ""])


def bonds(*rows, tags="comp_id atom_id_1 atom_id_2 type aromatic value_dist value_dist_esd"):
    return loop("chem_comp_bond", tags, *rows)


def planes(*rows):
    return loop("chem_comp_plane_atom", "comp_id plane_id atom_id dist_esd", *rows)


def atoms(*rows, tags="comp_id atom_id type_symbol type_energy charge x y z"):
    return loop("chem_comp_atom", tags, *rows)


BOND = bonds("X A B single n 1.4 0.02")
BARE = "atom_id_1 atom_id_2 type value_dist value_dist_esd"
NAMES = loop("chem_comp", "id name", "X x", "Y y")
ODD = {
    "quotes": [bonds("X \"O5'\" 'C 1' single n 1.4 0.02", "X O' C\" DOUB Y 1.2 ''")],
    "text": [bonds("X A B", ";single", ";", "n 1.4 0.02", "X C D single n 1.5 0.01")],
    "text of a pair": ["_chem_comp.id X\n_chem_comp.name\n;a\nname\n;\n", BOND],
    "unknown values": [bonds("X A B ? . ? .", "X B C single n 1.4 .")],
    "whole numbers": [
        bonds("X A B single n 1 2"),
        planes("X p A 1", "X p B 2"),
        atoms("X A C CH1 0 1 2 3", "X B O ? -1 ? . 3"),
    ],
    "planes": [BOND, planes("X p A 0", "X p B ?", "X p C 0.5")],
    "missing columns": [
        bonds("X A B 1.4 0.02", tags="comp_id atom_id_1 atom_id_2 value_dist value_dist_esd"),
        atoms("A", "B", tags="atom_id"),
    ],
    "no distances": [bonds("A B", tags="atom_id_1 atom_id_2")],
    "comments": ["# a\n", bonds("# b", "", "X A B single n 1.4 0.02 # c")],
    "a row on lines": [bonds("X A B", "  single n", "1.4 0.02", "", "  X B C arom y 1 1")],
    "half a row": [bonds("X A B single n 1.4 0.02", "X C D"), loop("a", "b", "c")],
    "tags alone": [BOND, planes()],
    "pairs": ["_chem_comp.id X\n_chem_comp_atom.comp_id X\n_chem_comp_atom.atom_id A\n", BOND],
    "two": [NAMES, BOND, "data_comp_Y\n", bonds("Y C D single n 1.4 0.02")],
    "two without names": [
        bonds("A B s 1 1", tags=BARE),
        "data_comp_Y\n",
        bonds("C D s 1 1", tags=BARE),
    ],
    "a monomer without bonds": [NAMES, BOND],
    "no loop": ["_chem_comp.id X\n"],
    "nothing": [],
}
ODD = {kind: "data_comp_X\n" + "".join(parts) for kind, parts in ODD.items()}


@pytest.mark.parametrize("kind", ODD)
def test_odd_files(kind, tmp_path):
    path = tmp_path / "X.cif"
    path.write_text(ODD[kind])
    theirs = read(path)
    compat.register()
    assert_same(read(path), theirs)


@pytest.mark.parametrize("kind", ODD)
def test_every_category_of_odd_files(kind):
    found = []
    for registered in (False, True):
        if registered:
            compat.register()
        for every in (False, True):
            found.append(readers.CIFReader.from_string(ODD[kind], parse_all_blocks=every).data)
    for ours, theirs in zip(found[2:], found[:2], strict=True):
        assert_same(ours, theirs)


def test_links_and_modifications():
    theirs = restraints.read_link_definitions(), templates.read_mod_definitions()
    compat.register()
    for ours, expected in zip(
        (restraints.read_link_definitions(), templates.read_mod_definitions()), theirs, strict=True
    ):
        assert_same(ours, expected)
    links = restraints.read_link_definitions()[0]
    assert "TRANS" in links
    assert_same(pickle.loads(pickle.dumps(links)), theirs[0][0])
    assert links.get("no such link") is None
    with pytest.raises(KeyError, match="no such link"):
        links["no such link"]


@pytest.mark.parametrize("name", ["ALA", "PRO", "CYS", "G", "ASN"])
def test_every_modification_of_a_monomer(name):
    (monomer,) = read(LIBRARY / name[0].lower() / f"{name}.cif").values()
    known = templates.read_mod_definitions()

    def modified():
        return {
            key: modifications.apply_modifications(monomer, ids, known)
            for key, ids in [*((key, [key]) for key in known), ("both", ["DEL-HN1", "DEL-OXT"])]
        }

    theirs = modified()
    compat.register()
    assert_same(modified(), theirs)
    assert calls("_apply_section")[0] > 100


def test_a_modification_of_a_monomer_without_restraints():
    (monomer,) = read(LIBRARY / "a/ALA.cif").values()
    monomer = {name: table.iloc[:0] for name, table in monomer.items()}
    known = templates.read_mod_definitions()
    theirs = modifications.apply_modifications(monomer, ["DEL-HN1", "AA-RNA"], known)
    compat.register()
    ours = modifications.apply_modifications(monomer, ["DEL-HN1", "AA-RNA"], known)
    assert_same(ours, theirs)


def model(name, folder):
    if name == "1ubi":
        return Path(str(importlib.resources.files("fusedops") / "data/1ubi.pdb"))
    for ending in ("pdb", "cif"):
        given = Path(os.environ.get("FUSEDOPS_DATA", "")) / f"{name}.{ending}.gz"
        if "FUSEDOPS_DATA" in os.environ and given.is_file():
            path = folder / f"{name}.{ending}"
            path.write_bytes(gzip.decompress(given.read_bytes()))
            return path
    pytest.skip(f"needs {name} in the folder that FUSEDOPS_DATA names")


@pytest.mark.parametrize("hydrogens", ["keep", "strip", "add"])
@pytest.mark.parametrize("name", ["1ubi", "4cup", "1ejg", "3p3w"])
def test_restraints_of_a_model(name, hydrogens, tmp_path, capsys):
    path, found = model(name, tmp_path), []
    ModelFT = importlib.import_module("torchref.model").ModelFT
    capsys.readouterr()
    for registered in (False, True):
        if registered:
            compat.register()
        # TorchRef turns the hydrogens of waters at random.
        torch.manual_seed(0)
        made = ModelFT(verbose=1, max_res=2.0, hydrogens=hydrogens)
        with warnings.catch_warnings():
            # A monomer that the library lacks is looked for in the net.
            warnings.simplefilter("ignore")
            (made.load_pdb if path.suffix == ".pdb" else made.load_cif)(str(path))
            made.restraints.rebuild_vdw_restraints(made.xyz().detach() + 0.01)
        found.append((vars(made.restraints), capsys.readouterr().out))
    assert_same(*reversed(found))
    if name == "1ubi" and hydrogens != "add":
        assert calls("build_h_candidate_pairs") == [2]


@pytest.mark.parametrize("name", ["1ubi", "4cup", "1ejg", "3p3w"])
def test_written_models(name, tmp_path):
    made = importlib.import_module("torchref.model").ModelFT(verbose=0, max_res=2.0)
    path, written = model(name, tmp_path), []
    (made.load_pdb if path.suffix == ".pdb" else made.load_cif)(str(path))
    metadata = importlib.import_module("torchref.io.metadata").RefinementMetadata(title="a title")
    for registered in (False, True):
        if registered:
            compat.register()
        for about in (None, metadata):
            made.write_cif(str(tmp_path / "written.cif"), metadata=about)
            written.append((tmp_path / "written.cif").read_bytes())
    assert written[:2] == written[2:]
    assert calls("dataframe_to_gemmi_structure") == [2]


def test_unregister_gives_all_back():
    def taken():
        owners = {n: compat._owner_of(n) for n in start.METHODS}
        assert None not in owners.values()
        return [getattr(owner, name.rpartition(".")[2]) for name, owner in owners.items()]

    theirs = taken()
    compat.register()
    assert not any(x is y for x, y in zip(taken(), theirs, strict=True))
    compat.unregister()
    assert all(x is y for x, y in zip(taken(), theirs, strict=True))
