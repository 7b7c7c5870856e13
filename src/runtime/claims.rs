//! What the scheduler is told of operations: the rules of `moe` with the process's configuration.

use super::registry::Runtime;
use crate::ggml::{BufferType, Tensor};
use crate::moe::Claims;
use std::sync::OnceLock;

impl Runtime {
    /// Whether the scheduler should hand `op` to us; `ours` is our buffer type. The configuration is looked at once.
    pub fn claims(&self, ours: BufferType, op: Tensor<'_>) -> bool {
        static CLAIMS: OnceLock<Claims> = OnceLock::new();
        let claims = CLAIMS.get_or_init(|| Claims {
            buffer_type: ours,
            offload_min_batch: self.config().offload_min_batch,
            takes_experts: self.takes_experts(),
            unplaced: self.config().claim_unplaced,
        });
        let claims = Claims { buffer_type: ours, ..*claims };
        if claims.is_on_our_experts(op) {
            self.bypass().asked();
        }
        claims.claims(op)
    }
}
