//! Staging blocks: host memory for one expert each, page-locked where that can be had, and memory for what is read back of it.

use super::driver::{PageLocked, Stream};
use crate::Error;
use crate::Result;
use crate::device::copy;
use crate::device::copy::staging_blocks;
use crate::ggml::{BufferType, HostBlock, Level, PIECE_BYTES, PROBE_BYTES, log};

enum Memory {
    PageLocked(PageLocked),
    /// The driver copies it to memory of its own first.
    Pageable(HostBlock),
}

pub(super) struct Block {
    memory: Memory,
    /// What was read back: both ends of each tensor, [`PROBE_BYTES`] each.
    read_back: PageLocked,
}

/// Tensors of an expert that a block has room to read back at first.
const TENSORS: usize = 8;

impl Block {
    /// Blocks for experts of up to `expert_bytes`, page-locked if `pinned`; says so once if that could not be had.
    pub(super) fn allocate_all(expert_bytes: usize, mut pinned: bool) -> Result<Vec<Self>> {
        let (n_blocks, size) = staging_blocks(expert_bytes);
        let mut memories = Vec::with_capacity(n_blocks);
        for _ in 0..n_blocks {
            memories.push(match page_locked(size, &mut pinned) {
                Some(memory) => Memory::PageLocked(memory),
                None => Memory::pageable(size)?,
            });
        }
        let block = |memory| Ok(Self { memory, read_back: read_back_memory(TENSORS)? });
        memories.into_iter().map(block).collect()
    }

    /// Has `read` fill the first `len` bytes; `false` if it does not, or they are more than there are.
    pub(super) fn fill(&mut self, len: usize, read: copy::Read<'_>) -> bool {
        match &mut self.memory {
            Memory::PageLocked(memory) => memory.bytes_mut().get_mut(..len).is_some_and(read),
            Memory::Pageable(memory) => memory.size() >= len && memory.write_with(len, read).unwrap_or(false),
        }
    }

    /// The first `len` bytes. Fails beyond the end.
    pub(super) fn bytes(&self, len: usize) -> Result<&[u8]> {
        match &self.memory {
            Memory::PageLocked(memory) => memory.bytes().get(..len).ok_or(Error::Contract("a range outside a block")),
            Memory::Pageable(memory) => memory.bytes(len),
        }
    }
}

/// Both ends of a tensor of `len` bytes, as offset and length.
fn ends(len: usize) -> [(usize, usize); 2] {
    let probe = len.min(PROBE_BYTES);
    [(0, probe), (len - probe, probe)]
}

/// Page-locked memory, if `pinned` and if it can be had. If not, one line says so, and `pinned` is off from then on.
fn page_locked(size: usize, pinned: &mut bool) -> Option<PageLocked> {
    if !*pinned {
        return None;
    }
    match PageLocked::new(size) {
        Ok(memory) => Some(memory),
        Err(error) => {
            log(Level::Info, &format!("no page-locked memory for copies, which are slower now ({error})"));
            *pinned = false;
            None
        }
    }
}

/// Room for both ends of so many tensors. Always page-locked: the driver's function waits, without a limit, for bytes that go to
/// other memory.
fn read_back_memory(n_tensors: usize) -> Result<PageLocked> {
    PageLocked::new(2 * PROBE_BYTES * n_tensors.max(1))
}

impl Block {
    /// Sends the next piece of the staged expert, `len` bytes of which the first `from` have been sent, to these addresses of
    /// the device (address and length of each tensor, in the order of the staged bytes). After the last piece reads both ends
    /// of each tensor back. Returns how many bytes have been sent now.
    ///
    /// # Safety
    /// The block and the device's memory at `targets` live, and are used by nobody else, until an event is reached that is
    /// recorded after the last piece, or the stream is idle.
    pub(super) unsafe fn send_piece(
        &mut self,
        stream: &Stream,
        len: usize,
        from: usize,
        targets: impl Iterator<Item = (usize, usize)> + Clone,
    ) -> Result<usize> {
        let n_tensors = targets.clone().count();
        if from == 0 && self.read_back.bytes().len() < 2 * PROBE_BYTES * n_tensors {
            self.read_back = read_back_memory(n_tensors)?;
        }
        let to = len.min(from.saturating_add(PIECE_BYTES));
        let staged = self.bytes(len)?;
        let mut start = 0;
        for (address, tensor_len) in targets.clone() {
            let range = from.max(start)..to.min(start + tensor_len);
            if !range.is_empty() {
                let address = address + (range.start - start);
                // SAFETY: the caller's promise.
                unsafe { stream.copy_to_device(address, &staged[range]) }?;
            }
            start += tensor_len;
        }
        if to < len {
            return Ok(to);
        }
        for (tensor, (address, len)) in targets.enumerate() {
            for (end, (offset, probe)) in ends(len).into_iter().enumerate() {
                let place = (2 * tensor + end) * PROBE_BYTES;
                // SAFETY: the memory was made for both ends of so many tensors; else the caller's promise.
                unsafe { stream.copy_to_host(self.read_back.start().byte_add(place), address + offset, probe) }?;
            }
        }
        Ok(to)
    }

    /// Whether what was read back is what was staged. To be asked once the last piece has ended. `lens`: bytes of each tensor.
    pub(super) fn has_arrived(&self, len: usize, lens: impl Iterator<Item = usize>) -> Result<bool> {
        let mut rest = self.bytes(len)?;
        for (tensor, len) in lens.enumerate() {
            let (bytes, after) = rest.split_at(len);
            for (end, (offset, probe)) in ends(len).into_iter().enumerate() {
                let found = &self.read_back.bytes()[(2 * tensor + end) * PROBE_BYTES..][..probe];
                if found != &bytes[offset..offset + probe] {
                    return Ok(false);
                }
            }
            rest = after;
        }
        Ok(true)
    }
}

impl Memory {
    fn pageable(size: usize) -> Result<Self> {
        let kind = BufferType::cpu().ok_or(Error::Ggml("a CPU buffer type"))?;
        HostBlock::allocate(kind, size).map(Self::Pageable)
    }
}
