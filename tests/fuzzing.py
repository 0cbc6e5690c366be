"""Settings and strategies shared by the fuzz tests of readers of files."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# Each example overwrites the same file, so a folder for all of them leaks nothing between them.
fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def mutated(content):
    return st.builds(
        lambda at, cut, data: content[:at] + data + content[at + cut :],
        st.integers(0, len(content)),
        st.integers(0, 40),
        st.binary(max_size=20),
    )
