//! The copy thread: carries experts to the device, one at a time, through a staging block of its own.
//!
//! Whoever sends a copy waits for its end, but not for ever: ggml can only wait without a limit, so that wait has a
//! thread of its own, which is left alone, with everything it uses, if a copy never ends.

use crate::cache::Slot;
use crate::ggml::{Backend, Device};
use crate::lanes::PoolWriter;
use crate::{Error, Result};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// A copy that is not complete after this time is lost.
const PATIENCE: Duration = Duration::from_secs(5);

/// One expert on its way. The staging bytes travel with it, so that nobody else can touch them meanwhile.
struct Copy {
    writer: Arc<PoolWriter>,
    slot: Slot,
    staging: Vec<u8>,
}

/// How a copy ended.
pub enum Copied {
    /// All of it is on the device.
    Whole,
    /// It did not arrive.
    Failed,
    /// It never ended; the device must not be used any more.
    Lost,
}

/// The copy thread and its own backend instance.
pub struct Copier {
    copies: Option<SyncSender<Copy>>,
    ends: Receiver<(Result<bool>, Vec<u8>)>,
    thread: Option<JoinHandle<()>>,
    /// Comes back with each copy.
    staging: Option<Vec<u8>>,
}

impl Copier {
    /// Starts the thread with a backend instance of its own on `device`.
    pub fn new(device: Device) -> Result<Self> {
        let mut backend = Backend::new(device)?;
        let (copies, incoming) = sync_channel::<Copy>(1);
        let (done, ends) = sync_channel(1);
        let run = move || {
            while let Ok(Copy { writer, slot, staging }) = incoming.recv() {
                let arrived = writer.fill(&mut backend, slot.0, &staging);
                drop(writer);
                if done.send((arrived, staging)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("moe-hot-copy".into()).spawn(run);
        let thread = thread.map_err(|_| Error::Ggml("a thread for copies"))?;
        Ok(Self { copies: Some(copies), ends, thread: Some(thread), staging: Some(Vec::new()) })
    }

    /// Copies what `read` puts into the staging block into a slot, and waits for it.
    pub fn copy(
        &mut self,
        writer: &Arc<PoolWriter>,
        slot: Slot,
        read: impl FnOnce(&mut Vec<u8>) -> Option<()>,
    ) -> Copied {
        let Some(mut staging) = self.staging.take() else { return Copied::Lost };
        if read(&mut staging).is_none() {
            self.staging = Some(staging);
            return Copied::Failed;
        }
        let copy = Copy { writer: writer.clone(), slot, staging };
        if self.copies.as_ref().is_none_or(|copies| copies.send(copy).is_err()) {
            return Copied::Failed;
        }
        match self.ends.recv_timeout(PATIENCE) {
            Ok((arrived, staging)) => {
                self.staging = Some(staging);
                if matches!(arrived, Ok(true)) { Copied::Whole } else { Copied::Failed }
            }
            Err(RecvTimeoutError::Timeout) => {
                // The thread hangs in the device and cannot be ended: leave it.
                self.thread = None;
                Copied::Lost
            }
            Err(RecvTimeoutError::Disconnected) => Copied::Failed,
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        drop(self.copies.take());
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has been reported by the panic hook and ended the copy as failed.
            let _ = thread.join();
        }
    }
}
