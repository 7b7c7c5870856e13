//! Captured graphs, as CUDA keeps them: found by the address of their first node. Where the graph's uid is still the same it is
//! not compared: what was captured is computed, with the addresses of that time. What is not used for a while is dropped.

use crate::snapshot::Snapshot;
use crate::{lock, settings, stats};
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

/// By the address of their first node.
static CAPTURED: LazyLock<Mutex<HashMap<usize, Captured>>> = LazyLock::new(Mutex::default);

struct Captured {
    uid: u64,
    /// Operations and shapes.
    kind: u64,
    /// Where each tensor's bytes are.
    addresses: Vec<usize>,
    last_used: Instant,
}

/// Has `graph`, whose first node is at `first`, computed as CUDA would: captures it, or replays what was captured.
pub(crate) fn replay(first: usize, uid: u64, graph: &mut Snapshot) {
    let (now, keep) = (Instant::now(), Duration::from_millis(settings::CAPTURE_KEEP_MS.get()));
    let mut captured = lock(&CAPTURED);
    let known = captured.get_mut(&first).filter(|known| now.duration_since(known.last_used) <= keep);
    if let Some(known) = known {
        known.last_used = now;
        if uid != 0 && uid == known.uid {
            graph.set_addresses(&known.addresses);
            return;
        }
        if known.kind == graph.kind() && known.addresses == graph.addresses() {
            known.uid = uid;
            return;
        }
    }
    stats::CAPTURES.add(1);
    let addresses = graph.addresses();
    captured.insert(first, Captured { uid, kind: graph.kind(), addresses, last_used: now });
}
