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
    /// To its standard output, then to the other.
    pub text: String,
    /// Whether it ended by itself, and in time.
    pub is_whole: bool,
}

/// One of the program's outputs.
struct Output {
    reader: PipeReader,
    is_open: bool,
    bytes: Vec<u8>,
}

/// Starts a program and reads what it prints until it ends, for as long as `limit`.
///
/// It runs in a process group of its own. What is left of the group afterwards is killed, so that a script that starts a
/// server, whatever it is asked, leaves none behind.
pub fn ask(command: Command, limit: Duration) -> io::Result<Answer> {
    let (mut outputs, mut child) = spawn(command)?;
    let group = Pid::from_child(&child);
    let is_whole = read(&mut outputs, &mut child, Instant::now() + limit);
    // There may be no one left.
    let _ = kill_process_group(group, Signal::KILL);
    child.wait()?;
    Ok(Answer {
        text: String::from_utf8_lossy(&outputs.map(|output| output.bytes).concat()).into_owned(),
        is_whole: is_whole?,
    })
}

/// The command holds the pipes' other ends, and goes with this function.
fn spawn(mut command: Command) -> io::Result<([Output; 2], Child)> {
    let ((reader, writer), (error_reader, error_writer)) = (io::pipe()?, io::pipe()?);
    command.stdin(Stdio::null()).stdout(writer).stderr(error_writer).process_group(0);
    let child = command.spawn()?;
    Ok(([reader, error_reader].map(|reader| Output { reader, is_open: true, bytes: Vec::new() }), child))
}

/// Reads what the child prints; returns whether that is all.
fn read(outputs: &mut [Output; 2], child: &mut Child, deadline: Instant) -> io::Result<bool> {
    let mut chunk = vec![0; 1 << 16];
    while outputs.iter().all(|output| output.bytes.len() < MOST_BYTES) && Instant::now() < deadline {
        // In this order: what it wrote before it ended can be read by now.
        let has_ended = child.try_wait()?.is_some();
        let ready = wait(outputs, if has_ended { Duration::ZERO } else { LOOK })?;
        if ready.is_empty() && has_ended {
            return Ok(true); // another process may have its outputs still
        }
        for n in ready {
            let output = &mut outputs[n];
            let n_bytes = output.reader.read(&mut chunk)?;
            output.bytes.extend_from_slice(&chunk[..n_bytes]);
            output.is_open = n_bytes > 0;
        }
    }
    Ok(false)
}

/// Which outputs have something to read, or their end; waits for that for some time.
fn wait(outputs: &[Output; 2], time: Duration) -> io::Result<Vec<usize>> {
    let open: Vec<_> = (0..outputs.len()).filter(|&n| outputs[n].is_open).collect();
    let mut asked: Vec<_> = open.iter().map(|&n| PollFd::new(&outputs[n].reader, PollFlags::IN)).collect();
    let time = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    match poll(&mut asked, Some(&time)) {
        Ok(_) => Ok(open.into_iter().zip(&asked).filter(|(_, fd)| !fd.revents().is_empty()).map(|(n, _)| n).collect()),
        Err(rustix::io::Errno::INTR) => Ok(Vec::new()),
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
        let answer =
            ask_shell("printf a; echo b >&2; head -c 1000000 /dev/zero | tr '\\0' x; echo z; echo c >&2", LONG);
        assert!(answer.is_whole && answer.text.starts_with("axxx") && answer.text.ends_with("xz\nb\nc\n"));
        assert_eq!(answer.text.len(), 1_000_007);
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
