//! Staging blocks: host memory for one expert each, page-locked where that can be had, and the event of its copy.

use super::driver::{Event, PageLocked};
use crate::Error;
use crate::Result;
use crate::device::copy;
use crate::device::copy::staging_blocks;
use crate::ggml::{BufferType, HostBlock, Level, log};

enum Memory {
    PageLocked(PageLocked),
    /// The driver copies it to memory of its own first.
    Pageable(HostBlock),
}

pub(super) struct Block {
    memory: Memory,
    /// Reached when the device has read the block.
    pub(super) event: Event,
}

impl Block {
    /// Blocks for experts of up to `expert_bytes`, page-locked if `pinned`; says so once if that could not be had.
    pub(super) fn allocate_all(expert_bytes: usize, mut pinned: bool) -> Result<Vec<Self>> {
        let (blocks, size) = staging_blocks(expert_bytes);
        let mut all = Vec::with_capacity(blocks);
        for _ in 0..blocks {
            let page_locked = if pinned { Some(PageLocked::new(size)) } else { None };
            let memory = match page_locked {
                Some(Ok(memory)) => Memory::PageLocked(memory),
                Some(Err(error)) => {
                    log(Level::Info, &format!("no page-locked memory for copies, which are slower now ({error})"));
                    pinned = false;
                    Memory::pageable(size)?
                }
                None => Memory::pageable(size)?,
            };
            all.push(Self { memory, event: Event::new()? });
        }
        Ok(all)
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
            Memory::PageLocked(memory) => memory.bytes().get(..len).ok_or(Error::Ggml("a range inside a block")),
            Memory::Pageable(memory) => memory.bytes(len),
        }
    }
}

impl Memory {
    fn pageable(size: usize) -> Result<Self> {
        let kind = BufferType::cpu().ok_or(Error::Ggml("a CPU buffer type"))?;
        HostBlock::allocate(kind, size).map(Self::Pageable)
    }
}
