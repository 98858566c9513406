"""What a pass takes on running SGLang servers, measured, as a hardware file for evaluate and plan.

python -m medusa_k25.probe server=URL hardware=NAME [blank=[URL,...]] [probe.rounds=3] [probe_file=FILE]

Measure a server without speculation, and servers with untrained heads of some sizes:
    python -m medusa_k25.export heads=blank num_nodes=4 export_dir=FOLDER
One at a time will do: points are added to those that the file has. With dry_run=true it only says what it would ask.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from medusa_k25.config import verb
from medusa_k25.costs.probing import Measured, hardware_file, other_model, own_file, table
from medusa_k25.reports.report import update_report

MEASURED = "_measured"


@verb("hardware", "probe")
def main(cfg: DictConfig) -> None:
    if cfg.server is None:
        raise ValueError("server=URL: give the address of a running SGLang server, such as http://127.0.0.1:30000")
    probe, machine = instantiate(cfg.probe), instantiate(cfg.hardware)
    name = machine.name if machine.name.endswith(MEASURED) else machine.name + MEASURED
    folder = Path(cfg.run_dir) / "conf"
    file = Path(cfg.probe_file) if cfg.probe_file else folder / "hardware" / f"{name}.yaml"
    earlier = own_file(file)
    servers = [probe.open(url) for url in (cfg.server, *(cfg.blank or ()))]
    places, notes = probe.places(servers)
    for server in servers:
        speculates = f"verifies {server.nodes} tokens a pass" if server.nodes > 1 else "does not speculate"
        print(f"{server.url}: SGLang {server.version} with {server.model}, {speculates}")
    notes += [note for server in servers if (note := other_model(server, machine))]
    for note in notes:
        print(note)
    print(
        f"{len(places)} places x {probe.calls_a_place} calls: {probe.requests(places):,} requests of up to "
        f"{probe.long} tokens"
    )
    if cfg.dry_run:
        print("dry run: nothing was measured or written")
        return
    chosen = cast(dict[str, Any], OmegaConf.to_container(cfg.hardware, resolve=True))
    measured = list[Measured]()
    for server in servers:  # what one server has shown is kept when the next one fails
        measured += probe.run([place for place in places if place.server == server])
        write(file, hardware_file(chosen, name, [each.point for each in measured], earlier))
    print(table(measured))
    update_report(
        Path(cfg.run_dir), "probe", {"file": str(file), "points": [asdict(each) for each in measured], "notes": notes}
    )
    use = "put it into conf/hardware" if cfg.probe_file else f"use it with --config-dir {folder} hardware={name}"
    print(f"wrote {file}: {len(measured)} passes measured; {use}")


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_text(text)
    part.rename(file)


if __name__ == "__main__":
    main()
