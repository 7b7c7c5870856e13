//! Tests that cannot share a process: because of the environment that they need, or of what they leave behind.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, abort};
use std::time::Duration;
use std::{any, env, thread};

/// Set in the processes that are started here.
const CHILD: &str = "MOE_HOT_TEST_PROCESS";
const TIME_LIMIT: Duration = Duration::from_secs(120);

/// Runs the test that calls it once more, in a process of its own, and `body` there, which is a closure of the test.
pub(crate) fn in_a_process_of_its_own<F: FnOnce()>(body: F) {
    run_again(test_of(&body), &[], body);
}

/// Name of the test that a closure stands in.
pub(crate) fn test_of<F>(_: &F) -> &'static str {
    any::type_name::<F>().split_once("::").unwrap().1.trim_end_matches("::{{closure}}")
}

/// Runs a test once more, in a process of its own with these variables, and `body` there.
pub(crate) fn run_again(test: &str, variables: &[(&str, &OsStr)], body: impl FnOnce()) {
    if env::var_os(CHILD).is_some() {
        thread::spawn(|| {
            thread::sleep(TIME_LIMIT);
            eprintln!("no end after {TIME_LIMIT:?}");
            abort();
        });
        return body();
    }
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env(CHILD, "1").envs(variables.iter().copied());
    let output = child.output().unwrap();
    let [printed, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    let has_passed = output.status.success() && printed.contains("1 passed");
    assert!(has_passed, "{test}, in a process of its own: {}\n{printed}\n{errors}", output.status);
}

/// A library that cargo has built for this test program.
pub(crate) fn beside_this_program(library: &str) -> PathBuf {
    let path = env::current_exe().unwrap().with_file_name(library);
    assert!(path.exists(), "{} is missing", path.display());
    path
}

/// `LD_LIBRARY_PATH` with this folder before all others.
pub(crate) fn search_path(folder: &Path) -> OsString {
    let others = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = [folder.to_path_buf()].into_iter().chain(env::split_paths(&others));
    env::join_paths(folders.filter(|folder| !folder.as_os_str().is_empty())).unwrap()
}
