//! Is the ggml we were loaded into the one we were built for?
//!
//! The commit decides when the host names one. A host built outside its own git checkout says `unknown`;
//! then the version and the layout of the structs that cross the boundary are compared instead.

use super::{Backend, BufferType, Device, c_text, sys};
use crate::{Error, Result};
use std::mem::size_of;

/// The llama.cpp commit that we are built for.
pub const COMMIT: &str = env!("LLAMA_COMMIT");
const VERSION: &str = env!("GGML_VERSION");
/// Shortest abbreviation of a commit that we take for a name.
const MIN_ABBREVIATION: usize = 7;

/// `sizeof(struct ggml_object)`, which ggml.c keeps to itself: two sizes, a pointer, an enum and padding.
const OBJECT_SIZE: usize = 32;

/// How sure we are that host and plugin fit together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RevisionCheck {
    /// The host names our commit.
    Exact,
    /// The host names no commit; its version and struct layouts are ours.
    Weak,
}

/// Compares the host's ggml with ours.
pub fn check_host() -> Result<RevisionCheck> {
    // SAFETY: both return static strings.
    let (commit, version) = unsafe { (c_text(sys::ggml_commit()), c_text(sys::ggml_version())) };
    let check = compare_revision(&commit, &version)?;
    Device::cpu()?;
    check_layout()?;
    Ok(check)
}

/// Whether `commit`, abbreviated or not, names ours.
pub fn is_our_commit(commit: &str) -> bool {
    is_commit(commit) && COMMIT.starts_with(commit)
}

/// Whether `word` can be the name of a commit.
pub fn is_commit(word: &str) -> bool {
    word.len() >= MIN_ABBREVIATION && word.chars().all(|c| c.is_ascii_hexdigit())
}

fn compare_revision(commit: &str, version: &str) -> Result<RevisionCheck> {
    if commit == "unknown" || commit.is_empty() {
        if version == VERSION {
            return Ok(RevisionCheck::Weak);
        }
    } else if is_our_commit(commit) {
        return Ok(RevisionCheck::Exact);
    }
    Err(Error::Revision {
        host: format!("ggml {version} ({commit})"),
        plugin: format!("ggml {VERSION} ({})", &COMMIT[..9]),
    })
}

/// Compares what the host computes from its own structs with what we compute from ours.
fn check_layout() -> Result<()> {
    let expect = |what, host: usize, plugin: usize| {
        if host == plugin { Ok(()) } else { Err(Error::Layout { what, host, plugin }) }
    };
    // SAFETY: takes no arguments.
    let tensor_overhead = unsafe { sys::ggml_tensor_overhead() };
    expect("ggml_tensor size", tensor_overhead, OBJECT_SIZE + size_of::<sys::ggml_tensor>())?;

    // SAFETY: takes plain numbers.
    let graph_overhead = unsafe { sys::ggml_graph_overhead_custom(1, false) };
    expect("ggml_cgraph size", graph_overhead, graph_overhead_of_one_node())?;

    let cpu = Device::cpu()?;
    let backend = Backend::new(cpu)?;
    let (host, ours) = (cpu.as_raw() as usize, backend.device_field());
    expect("ggml_backend layout", host, ours)?;

    let cpu = cpu.as_raw();
    // SAFETY: the device is registered; the field read lies behind the whole interface, which is what is tested.
    let (host, ours) = unsafe { (sys::ggml_backend_dev_backend_reg(cpu) as usize, (*cpu).reg as usize) };
    expect("ggml_backend_device layout", host, ours)?;

    let plain = BufferType::cpu().ok_or(Error::Ggml("a CPU buffer type"))?.as_raw();
    // SAFETY: the buffer type is registered; asking for one alignment's worth of memory.
    let buffer = unsafe { sys::ggml_backend_buft_alloc_buffer(plain, 64) };
    if buffer.is_null() {
        return Err(Error::Ggml("a buffer"));
    }
    // SAFETY: the buffer is valid until freed below; the fields read lie behind its whole interface.
    let (host, ours) = unsafe {
        let host = (sys::ggml_backend_buffer_get_size(buffer), plain as usize);
        let ours = ((*buffer).size, (*buffer).buft as usize);
        sys::ggml_backend_buffer_free(buffer);
        (host, ours)
    };
    expect("ggml_backend_buffer size field", host.0, ours.0)?;
    expect("ggml_backend_buffer type field", host.1, ours.1)
}

/// What `ggml_graph_overhead_custom(1, false)` answers for our `ggml_cgraph` (ggml.c, `ggml_graph_nbytes`):
/// the struct, one node, one leaf, and for a hash table of 2: use counts, keys and one word of bits.
fn graph_overhead_of_one_node() -> usize {
    const ALIGN: usize = sys::GGML_MEM_ALIGN as usize;
    let pointer = size_of::<*const sys::ggml_tensor>();
    let bytes = size_of::<sys::ggml_cgraph>() + 2 * pointer + 2 * size_of::<i32>() + 2 * pointer + size_of::<u32>();
    OBJECT_SIZE + bytes.next_multiple_of(ALIGN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abbreviated_or_full_commit_is_exact() {
        assert_eq!(compare_revision(&COMMIT[..9], "9.9.9").unwrap(), RevisionCheck::Exact);
        assert_eq!(compare_revision(COMMIT, "9.9.9").unwrap(), RevisionCheck::Exact);
    }

    #[test]
    fn an_unknown_commit_is_weak_only_with_our_version() {
        assert_eq!(compare_revision("unknown", VERSION).unwrap(), RevisionCheck::Weak);
        assert!(compare_revision("unknown", "0.0.1").is_err());
    }

    #[test]
    fn another_commit_is_refused_and_both_are_named() {
        let message = compare_revision("deadbeef0", "0.24.0").unwrap_err().to_string();
        assert!(message.contains("ggml 0.24.0 (deadbeef0)"), "{message}");
        assert!(message.contains(VERSION) && message.contains(&COMMIT[..9]), "{message}");
        assert!(compare_revision(&COMMIT[..3], VERSION).is_err(), "too short to name a commit");
    }

    #[test]
    fn the_ggml_that_tests_link_has_our_layout() {
        crate::ggml::testing::load_cpu();
        assert_eq!(check_host().unwrap(), RevisionCheck::Exact);
    }
}
