"""What `vault.py` needs besides itself: for each file, the texts that are replaced, and by what.

Together with vault.py, these are all files of a tier: `TIER` of scripts/house.py, and "Where to
add" in CONTRIBUTING.md.
"""

VAULT = "sidecar/src/keepstep_sidecar/tiers/vault.py"

EDITS: dict[str, list[tuple[str, str]]] = {
    "lib/src/keepstep/steps.py": [
        (
            '    ARCHIVE = "archive", False, True\n',
            '    ARCHIVE = "archive", False, True\n    VAULT = "vault", False, True\n',
        ),
    ],
    "sidecar/src/keepstep_sidecar/config/sidecar.py": [
        (
            "    peer_listen: str | None =",
            '    vault: Path | None = setting(DIR, None, "A directory that all pods see.")\n'
            "    peer_listen: str | None =",
        ),
    ],
    "sidecar/src/keepstep_sidecar/app.py": [
        (
            "    return RemoteInventory(peers=peers,",
            "    others = []\n"
            "    if config.vault is not None:\n"
            "        from keepstep_sidecar.tiers.vault import VaultTier\n"
            "\n"
            "        others.append(VaultTier(config.vault, run=config.run))\n"
            "    return RemoteInventory(*others, peers=peers,",
        ),
    ],
    "operator/src/keepstep_operator/api/tiers.py": [
        (
            "def parse_peers(",
            "@dataclass(frozen=True, kw_only=True)\n"
            "class Vault:\n"
            '    """A claim of the namespace."""\n'
            "\n"
            "    claim: str\n"
            "\n"
            "\n"
            "def parse_vault(spec: Fields) -> Vault | None:\n"
            '    """`spec.vault`; None if it is left out. Raises PolicyError."""\n'
            '    if spec.value("vault") is None:\n'
            "        return None\n"
            '    claim = spec.child("vault").text("claimName", _NAME, "the name of a claim")\n'
            "    return Vault(claim=claim)\n"
            "\n"
            "\n"
            "def parse_peers(",
        ),
    ],
    "operator/src/keepstep_operator/api/policy.py": [
        ("    parse_retention,\n", "    parse_retention,\n    parse_vault,\n    Vault,\n"),
        (
            "    archive: Archive | None = None\n",
            "    archive: Archive | None = None\n    vault: Vault | None = None\n",
        ),
        (
            "        archive=archive,\n",
            "        archive=archive,\n        vault=parse_vault(spec),\n",
        ),
    ],
    "operator/src/keepstep_operator/injection/remote_tiers.py": [
        (
            "    return [*_of_archive(policy), *_of_peers(policy, ports)]\n",
            '    path = {"name": "KEEPSTEP_VAULT", "value": "/keepstep/vault"}\n'
            "    vault = [path] if policy.vault else []\n"
            "    return [*_of_archive(policy), *_of_peers(policy, ports), *vault]\n",
        ),
        (
            "    directory = _directory(policy)\n    if directory is None:\n        return []\n"
            "    if directory.claim",
            "    if policy.vault is not None:\n"
            '        claim = {"claimName": policy.vault.claim}\n'
            '        return [{"name": "vault", "persistentVolumeClaim": claim}]\n'
            "    directory = _directory(policy)\n    if directory is None:\n        return []\n"
            "    if directory.claim",
        ),
        (
            "    directory = _directory(policy)\n    if directory is None:\n        return []\n"
            "    mount: Body",
            "    if policy.vault is not None:\n"
            '        return [{"name": "vault", "mountPath": "/keepstep/vault"}]\n'
            "    directory = _directory(policy)\n    if directory is None:\n        return []\n"
            "    mount: Body",
        ),
    ],
    "crds/keepstep.dev_checkpointpolicies.yaml": [
        (
            "              archive:\n                description: ",
            "              vault:\n"
            "                description: A claim that all pods see.\n"
            "                type: object\n"
            "                required: [claimName]\n"
            "                properties:\n"
            "                  claimName:\n"
            "                    description: Its name.\n"
            "                    type: string\n"
            "                    minLength: 1\n"
            "                    maxLength: 253\n"
            "              archive:\n                description: ",
        ),
    ],
}
