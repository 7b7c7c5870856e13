//! Asking a program something: what it prints to both of its outputs, read through a pipe.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process_group};
use std::io::{self, PipeReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// More than any program of llama.cpp's says of itself. What prints more is stopped.
const MOST_BYTES: usize = 1 << 22;
/// How often to look whether a program has ended while another process keeps its outputs open.
const LOOK: Duration = Duration::from_millis(20);

/// What a program has printed.
pub struct Answer {
    pub text: String,
    /// Whether it ended by itself, and in time.
    pub is_whole: bool,
}

/// Starts a program and reads what it prints until it ends, for as long as `limit`.
///
/// It runs in a process group of its own. What is left of the group afterwards is killed, so that a script that starts a
/// server, whatever it is asked, leaves none behind.
pub fn ask(command: Command, limit: Duration) -> io::Result<Answer> {
    let (reader, mut child) = spawn(command)?;
    let group = Pid::from_child(&child);
    let read = read(reader, &mut child, Instant::now() + limit);
    // There may be no one left.
    let _ = kill_process_group(group, Signal::KILL);
    child.wait()?;
    let (bytes, is_whole) = read?;
    Ok(Answer { text: String::from_utf8_lossy(&bytes).into_owned(), is_whole })
}

/// The command holds the pipe's other end, and goes with this function.
fn spawn(mut command: Command) -> io::Result<(PipeReader, Child)> {
    let (reader, writer) = io::pipe()?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer).process_group(0);
    let child = command.spawn()?;
    Ok((reader, child))
}

/// What the child has printed, and whether that is all.
fn read(mut reader: PipeReader, child: &mut Child, deadline: Instant) -> io::Result<(Vec<u8>, bool)> {
    let mut bytes = Vec::new();
    let mut chunk = vec![0; 1 << 16];
    let mut is_open = true;
    while bytes.len() < MOST_BYTES && Instant::now() < deadline {
        // In this order: what it wrote before it ended can be read by now.
        let has_ended = child.try_wait()?.is_some();
        if !is_open {
            if has_ended {
                return Ok((bytes, true));
            }
            std::thread::sleep(LOOK); // it has closed its outputs and goes on
        } else if is_readable(&reader, if has_ended { Duration::ZERO } else { LOOK })? {
            let n_bytes = reader.read(&mut chunk)?;
            bytes.extend_from_slice(&chunk[..n_bytes]);
            is_open = n_bytes > 0;
        } else if has_ended {
            return Ok((bytes, true)); // another process has its outputs
        }
    }
    Ok((bytes, false))
}

/// Whether there is something to read, or the end, within this time.
fn is_readable(reader: &PipeReader, time: Duration) -> io::Result<bool> {
    let time = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    match poll(&mut [PollFd::new(reader, PollFlags::IN)], Some(&time)) {
        Ok(n_ready) => Ok(n_ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn ask_shell(script: &str, limit: Duration) -> Answer {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        ask(command, limit).unwrap()
    }

    #[test]
    fn both_outputs_are_read_to_the_end() {
        let answer = ask_shell("echo a; echo b >&2; head -c 1000000 /dev/zero | tr '\\0' x; echo z", LONG);
        assert!(answer.is_whole && answer.text.starts_with("a\nb\nxxx") && answer.text.ends_with("xz\n"));
        assert_eq!(answer.text.len(), 1_000_006);
    }

    #[test]
    fn a_process_that_keeps_the_outputs_is_not_waited_for_and_ends() {
        let start = Instant::now();
        let answer = ask_shell("sleep 50 & echo $!", LONG);
        assert!(answer.is_whole && start.elapsed() < LONG / 2);
        let pid = answer.text.trim();
        let is_alive = || std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
        while is_alive() {
            assert!(start.elapsed() < LONG / 2, "killed with the group");
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_does_not_end_is_stopped() {
        let start = Instant::now();
        let late = ask_shell("echo a; exec >&- 2>&-; sleep 50", Duration::from_millis(200));
        assert!(!late.is_whole && late.text == "a\n");
        let endless = ask_shell("cat /dev/zero", LONG);
        assert!(!endless.is_whole && endless.text.len() >= MOST_BYTES);
        assert!(start.elapsed() < LONG / 2);
    }
}
