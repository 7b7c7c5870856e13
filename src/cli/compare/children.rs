//! Starts the programs that are compared, and ends them: at their end, on an error, and when the user interrupts us.
//!
//! One that runs longer than it may is ended too. Each runs in a process group of its own, so that whatever it has started ends
//! with it. Its outputs go to files.

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, sleep};
use std::time::{Duration, Instant};

/// How often to look whether a program has ended.
const LOOK: Duration = Duration::from_millis(20);
/// How long a server may take to end when it is asked to.
const END_LIMIT: Duration = Duration::from_secs(60);
/// Of a failed program's log, lines that are shown: the last one that says something.
const SHOWN_BYTES: usize = 300;

/// The process groups that run.
static GROUPS: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C, SIGTERM and SIGHUP end what runs; [`was_interrupted`] says so then.
pub fn watch_interrupts() -> Result<()> {
    let end_all = || {
        INTERRUPTED.store(true, Ordering::SeqCst);
        let groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        groups.iter().for_each(|&group| kill_group(group));
    };
    ctrlc::set_handler(end_all).context("watching for Ctrl-C")
}

/// Whether the user wants us to end.
pub fn was_interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

fn kill_group(group: i32) {
    if let Some(group) = Pid::from_raw(group) {
        // There may be no one left.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// A program that runs. Dropped, it is killed with all that it has started.
pub struct Running {
    child: Child,
    group: i32,
    log: PathBuf,
    name: String,
    watch: Watch,
}

/// A thread that kills a group when its time is over, unless it is told before that there is no need.
struct Watch {
    limit: Duration,
    is_over: Arc<AtomicBool>,
    no_need: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn over(group: i32, limit: Duration) -> Result<Self> {
        let is_over = Arc::new(AtomicBool::new(false));
        let (no_need, told) = channel();
        let over = Arc::clone(&is_over);
        let watch = move || {
            if told.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                over.store(true, Ordering::SeqCst);
                kill_group(group);
            }
        };
        let thread = Builder::new().spawn(watch).context("watching the time")?;
        Ok(Self { limit, is_over, no_need: Some(no_need), thread: Some(thread) })
    }

    fn end(&mut self) {
        self.no_need = None;
        if let Some(thread) = self.thread.take() {
            // It does nothing that can panic.
            let _ = thread.join();
        }
    }
}

impl Running {
    /// Starts a program that may run for `limit`; what it prints goes to `log`, its standard output to `log` with `.out` behind it.
    pub fn start(mut command: Command, log: &Path, limit: Duration) -> Result<Self> {
        let name = Path::new(command.get_program()).display().to_string();
        let file = |path: &Path| File::create(path).with_context(|| path.display().to_string());
        command.stdin(Stdio::null()).stdout(file(&output_of(log))?).stderr(file(log)?).process_group(0);
        let mut child = command.spawn().with_context(|| format!("{name}: cannot be started"))?;
        let group = Pid::from_child(&child).as_raw_nonzero().get();
        GROUPS.lock().unwrap_or_else(PoisonError::into_inner).insert(group);
        let watch = Watch::over(group, limit).inspect_err(|_| {
            kill_group(group);
            let _ = child.wait();
        })?;
        let running = Self { child, group, log: log.into(), name, watch };
        // Else it came too late for the one who ends them all.
        ensure!(!was_interrupted(), "interrupted");
        Ok(running)
    }

    /// Its end, if it has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| self.name.clone())
    }

    fn wait(&mut self, limit: Option<Duration>) -> Result<Option<ExitStatus>> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.ended()? {
                return Ok(Some(status));
            }
            if limit.is_some_and(|limit| start.elapsed() > limit) {
                return Ok(None);
            }
            sleep(LOOK);
        }
    }

    /// Why it has ended if its time was over: what it did not answer then comes from that.
    pub fn check_time(&self) -> Result<()> {
        ensure!(
            !self.watch.is_over.load(Ordering::SeqCst),
            "{} still ran after {}, far longer than expected, and was ended; the end of {}: {}",
            self.name,
            humantime::format_duration(Duration::from_secs(self.watch.limit.as_secs())),
            self.log.display(),
            last_line(&self.log())
        );
        Ok(())
    }

    /// Asks it to end, waits for that, and returns its whole log.
    pub fn stop_and_read(mut self) -> Result<String> {
        if let Some(pid) = Pid::from_raw(self.group) {
            kill_process(pid, Signal::TERM).with_context(|| self.name.clone())?;
        }
        let status = self.wait(Some(END_LIMIT))?;
        self.check_time()?;
        ensure!(status.is_some(), "{} did not end within {} s after SIGTERM", self.name, END_LIMIT.as_secs());
        ensure!(!was_interrupted(), "interrupted");
        Ok(self.log())
    }

    /// What it has printed so far beside its results.
    pub fn log(&self) -> String {
        read(&self.log)
    }

    /// What went wrong, by its log.
    pub fn complaint(&self) -> String {
        format!("{} failed; the end of {}: {}", self.name, self.log.display(), last_line(&self.log()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.watch.end();
        kill_group(self.group);
        let _ = self.child.wait();
        GROUPS.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.group);
    }
}

/// What a program that has ended printed.
pub struct Printed {
    /// To its standard output.
    pub output: String,
    /// To its standard error.
    pub log: String,
}

/// Runs a program to its end, which must be a success, and come within `limit`.
pub fn run(command: Command, log: &Path, limit: Duration) -> Result<Printed> {
    let mut running = Running::start(command, log, limit)?;
    let status = running.wait(None)?;
    ensure!(!was_interrupted(), "interrupted");
    running.check_time()?;
    if !status.is_some_and(|status| status.success()) {
        bail!(running.complaint());
    }
    Ok(Printed { output: read(&output_of(log)), log: running.log() })
}

fn output_of(log: &Path) -> PathBuf {
    log.with_extension("out")
}

fn read(path: &Path) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

/// The last line with an error in it, else the last line at all.
fn last_line(log: &str) -> String {
    let is_error = |line: &&str| ["error", "failed", "need at least"].iter().any(|word| line.contains(word));
    let lines = || log.lines().map(str::trim).filter(|line| !line.is_empty());
    let line = lines().rfind(is_error).or_else(|| lines().next_back()).unwrap_or("(empty)");
    line.chars().take(SHOWN_BYTES).collect()
}

/// A port of 127.0.0.1 that nobody listens on.
pub fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("looking for a free port")?;
    Ok(listener.local_addr().context("looking for a free port")?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn outputs_are_read_from_their_files() {
        let folder = tempfile::tempdir().unwrap();
        let printed = run(shell("echo a; echo b >&2"), &folder.path().join("x.log"), END_LIMIT).unwrap();
        assert_eq!((printed.output.as_str(), printed.log.as_str()), ("a\n", "b\n"));
    }

    #[test]
    fn a_failure_shows_the_line_that_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let script = "echo 'error: no such model' >&2; echo bye >&2; exit 3";
        let failed = run(shell(script), &folder.path().join("x.log"), END_LIMIT);
        let said = format!("{:#}", failed.err().unwrap());
        assert!(said.contains("x.log") && said.ends_with("error: no such model"), "{said}");
    }

    #[test]
    fn a_program_that_hangs_is_ended_and_its_last_line_is_shown() {
        let folder = tempfile::tempdir().unwrap();
        let start = Instant::now();
        let limit = Duration::from_millis(1500);
        let hung = run(shell("echo 'loading' >&2; sleep 100"), &folder.path().join("x.log"), limit);
        let said = format!("{:#}", hung.err().unwrap());
        assert!(
            said.contains("sh still ran after 1s, far longer than expected") && said.ends_with("x.log: loading"),
            "{said}"
        );
        assert!(start.elapsed() < END_LIMIT);
    }

    #[test]
    fn what_is_dropped_ends_with_all_it_has_started() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("x.log");
        let mut running = Running::start(shell("sleep 100 & echo $! >&2; wait"), &log, END_LIMIT).unwrap();
        let start = Instant::now();
        while running.log().is_empty() && start.elapsed() < END_LIMIT {
            sleep(LOOK);
        }
        assert!(running.ended().unwrap().is_none());
        let grandchild = running.log().trim().to_owned();
        drop(running);
        let is_alive =
            || fs::read_to_string(format!("/proc/{grandchild}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
        while is_alive() {
            assert!(start.elapsed() < END_LIMIT, "killed with the group");
            sleep(LOOK);
        }
    }
}
