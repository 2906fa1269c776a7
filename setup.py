"""What pyproject.toml cannot say of a wheel: it has generator and templates, as tuned._generator (docs/decisions/0043)."""

from setuptools import find_packages, setup

INSIDE = "tuned._generator"

folders = {
    f"{INSIDE}{name.removeprefix('generator')}": name.replace(".", "/")
    for name in find_packages(include=["generator*"])
}
folders |= {f"{INSIDE}.templates": "templates"}
setup(
    packages=[*find_packages(include=["tuned*"]), *folders],
    package_dir=folders,
    package_data={
        "tuned": ["py.typed", "winners/*.json"],
        INSIDE: ["landscapes/*/*.json.gz", "samples/*/*.json.gz"],
        f"{INSIDE}.reporting.html": ["*.css", "*.jinja", "*.js"],
        f"{INSIDE}.scaffold": ["*.txt"],
        f"{INSIDE}.templates": ["*.jinja"],
    },
)
