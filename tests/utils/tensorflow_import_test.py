"""Tests of the effects of importing TensorFlow and TF-Agents, each in a new process."""

import pathlib
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import tensorflow as tf
from conftest import ROOT, start_binary, user_environment

from pipeline.utils.tensorflow_import import LEGACY_KERAS

TF_AGENTS_COMMAND = "pip install --no-deps tf-agents==0.19.0"
KERAS_3_MODEL = """
import numpy as np
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
outputs = lambda: model(np.ones((1, 3), np.float32)).numpy().tolist()
before = outputs()
"""


def run(code: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess:
    """Runs Python code as a user's shell would."""
    environment = user_environment(**variables)
    code = f"import gc; gc.disable()\n{textwrap.dedent(code)}"  # imports take less time
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)


def last_line(error: str) -> str:
    return error.strip().splitlines()[-1]


def test_only_lines_of_tensorflow_s_start_are_kept_from_standard_error(tmp_path):
    (tmp_path / "tensorflow.py").write_text("""
import os
os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called ...\\n")
os.write(2, b"I0000 00:00:1 1 port.cc:153] oneDNN custom operations are on.\\n")
os.write(2, b"the library was compiled to use AVX\\0\\n")
os.abort()
""")
    code = "from pipeline.utils import tensorflow_import as x; x.import_tensorflow()"
    ended = run(code, PYTHONPATH=str(tmp_path))
    assert ended.stderr == "the library was compiled to use AVX\0\n"
    assert ended.returncode < 0


def test_cusolver_is_loaded_before_tensorflow_looks_for_it(tmp_path):
    library = tmp_path / "nvidia" / "cusolver" / "lib" / "libcusolver.so.11"
    library.parent.mkdir(parents=True)
    any_library = next(pathlib.Path(np.__file__).parent.glob("fft/*.so"))
    shutil.copyfile(any_library, library)
    (tmp_path / "tensorflow.py").write_text("print(open('/proc/self/maps').read())\nexit()\n")
    code = "from pipeline.utils import tensorflow_import as x; x.import_tensorflow()"
    assert str(library) in run(code, PYTHONPATH=str(tmp_path)).stdout
    library.write_bytes(b"damaged")
    assert str(library) not in run(code, PYTHONPATH=str(tmp_path)).stdout


def test_gradients_of_a_tensor_array_are_summed():
    variable = tf.Variable([1.0, 2.0, 3.0])

    @tf.function(autograph=False)
    def gradient():
        with tf.GradientTape() as tape:
            array = tf.TensorArray(tf.float32, 3).unstack(variable)
            total = tf.add_n([array.read(t) ** 2 for t in range(3)])
        return tape.gradient(total, variable)

    assert gradient().numpy().tolist() == [2.0, 4.0, 6.0]


def test_a_python_without_docstrings_is_refused():
    code = "from pipeline.utils import tensorflow_import as x; x.import_tensorflow()"
    error = run(code, PYTHONOPTIMIZE="2").stderr
    assert "drops docstrings: start it without -OO" in last_line(error)


def test_importing_says_only_that_tf_keras_becomes_keras_2_and_leaves_no_module_that_poses_as_gym(
    finished_run,
):
    code = """
    import sys, warnings
    import pipeline
    assert "tensorflow" not in sys.modules
    with warnings.catch_warnings(record=True) as told:
        pipeline.load_policy(sys.argv[1])
    assert [x.category for x in told] == [UserWarning]
    assert str(told[0].message).startswith("From here on tf.keras is Keras 2")
    import tensorflow as tf
    import tf_agents, tf_keras
    tf.constant(1) + 1
    assert tf.keras.Model is tf_keras.Model
    assert not {"gym", "pygame", "keras"} & set(sys.modules)
    """
    ended = run(code, finished_run.root_dir)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_program_that_has_imported_keras_3_is_told_what_to_do_and_its_models_go_on(finished_run):
    code = f"""
    import sys
    from tensorflow import keras
    {textwrap.indent(KERAS_3_MODEL, "    ").strip()}
    import pipeline, pipeline.utils.errors
    try:
        pipeline.load_policy(sys.argv[1])
    except pipeline.utils.errors.UserError as error:
        print(error)
    assert outputs() == before
    """
    ended = run(code, finished_run.root_dir)
    assert ended.returncode == 0, ended.stderr
    assert f"{LEGACY_KERAS}=1" in ended.stdout and "`import keras`" in ended.stdout


def test_a_keras_3_model_beside_a_policy_is_what_it_was(finished_run):
    code = f"""
    import sys, warnings
    import keras, pipeline
    {textwrap.indent(KERAS_3_MODEL, "    ").strip()}
    with warnings.catch_warnings(record=True) as told:
        policy = pipeline.load_policy(sys.argv[1])
    assert not told
    policy.predict(np.zeros(4, np.float32))
    assert keras.__version__.startswith("3.")
    assert outputs() == before
    model.compile("adam", "mse")
    model.fit(np.ones((4, 3)), np.zeros((4, 2)), verbose=0)
    assert outputs() != before
    """
    ended = run(code, finished_run.root_dir, **{LEGACY_KERAS: "1"})
    assert ended.returncode == 0, ended.stderr


def test_keras_3_that_the_environment_demands_is_refused(tmp_path):
    environment = user_environment(**{LEGACY_KERAS: "0"})
    flags = (f"--root_dir={tmp_path / 'run'}", "--gin_file=dqn_cartpole")
    process = start_binary("train", *flags, popen=subprocess.Popen, env=environment)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert last_line(error).startswith("error: ") and f"{LEGACY_KERAS}=1" in error


def test_without_tf_agents_the_second_command_is_told(finished_run, tmp_path):
    without = "import sys; sys.modules['tf_agents'] = None\n"
    library = run(
        without + "import pipeline; pipeline.load_policy(sys.argv[1])", finished_run.root_dir
    )
    assert library.returncode == 1
    assert TF_AGENTS_COMMAND in last_line(library.stderr)
    program = run(
        without + "from pipeline import train; train.main()",
        f"--root_dir={tmp_path / 'run'}",
        "--gin_file=dqn_cartpole",
    )
    assert program.returncode == 2
    assert program.stderr.startswith("error: ") and TF_AGENTS_COMMAND in program.stderr
    assert not (tmp_path / "run").exists()
