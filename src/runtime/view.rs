//! What snapshots show, and since when it was counted.

use crate::profile::Counts;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a snapshot shows. It changes what is shown, not what is recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Counts, and times.
    Full,
    /// Counts.
    #[default]
    Update,
    /// Nothing.
    Off,
}

/// What is shown, and since when.
#[derive(Default)]
pub struct View(Mutex<Since>);

/// Counts when the mode was last set.
#[derive(Default)]
pub struct Since {
    /// What is shown.
    pub mode: Mode,
    /// By the model's address (models stay) and the layer's number.
    pub layers: BTreeMap<(usize, u32), (Counts, [u64; 3])>,
}

impl View {
    /// Since when, to be read or changed. Tokens never wait for it.
    pub fn since(&self) -> MutexGuard<'_, Since> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
