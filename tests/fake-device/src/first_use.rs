//! What a backend does when it sees a graph for the first time: it compiles or loads kernels, and its caller waits.

use crate::{lock, memory, settings, stats, sys};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{LazyLock, Mutex};
use std::thread;
use std::time::Duration;

const KIB: u64 = 1 << 10;

/// Kinds of graphs that were seen.
static SEEN: LazyLock<Mutex<HashSet<u64>>> = LazyLock::new(Mutex::default);

/// Waits, and takes memory, if these nodes are the first of their kind: of their operations, types and shapes.
///
/// # Safety
/// The nodes are valid, and so are their sources.
pub(crate) unsafe fn wait(nodes: &[*mut sys::ggml_tensor]) {
    let mut kind = DefaultHasher::new();
    for &node in nodes {
        // SAFETY: passed on from the caller.
        let (node, source) = unsafe { (&*node, (*node).src[0].as_ref()) };
        (node.op, node.type_, node.ne).hash(&mut kind);
        source.map(|source| (source.type_, source.ne)).hash(&mut kind);
    }
    if !lock(&SEEN).insert(kind.finish()) {
        return;
    }
    stats::FIRST_USES.add(1);
    memory::take_for_good((settings::FIRST_USE_KIB.get() * KIB) as usize);
    thread::sleep(Duration::from_millis(settings::FIRST_USE_MS.get()));
}
