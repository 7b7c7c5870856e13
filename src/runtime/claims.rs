//! What the scheduler is told of operations: the rules of `moe` with the process's configuration.

use super::registry::Runtime;
use crate::ggml::{BufferType, Device, Tensor};
use crate::moe::Claims;
use std::sync::OnceLock;

impl Runtime {
    /// Whether the scheduler should hand `op` to us; `ours` is our buffer type. The configuration is looked at once.
    pub fn claims(&self, ours: BufferType, op: Tensor<'_>) -> bool {
        self.claims_by(self.rules(ours), op)
    }

    /// Whether `op` belongs to a split on the device, whose own memory is `rows_from`. `takes_scales`: whether the last
    /// operation on experts that was asked about does.
    pub fn claims_on_device(
        &self,
        ours: BufferType,
        rows_from: BufferType,
        takes_scales: bool,
        op: Tensor<'_>,
    ) -> bool {
        let rules = Claims { rows_from: Some(rows_from), takes_scales, ..self.rules(ours) };
        self.claims_by(rules, op)
    }

    /// The device that splits may lie on: the hot one, where it is a GPU of this machine.
    pub fn split_device(&self) -> Option<Device> {
        if !self.caches() || self.config().test_host_splits {
            return None;
        }
        self.hot_device().as_ref().ok().map(|hot| hot.device()).filter(Device::is_local_gpu)
    }

    fn claims_by(&self, rules: Claims, op: Tensor<'_>) -> bool {
        if rules.is_on_our_experts(op) {
            self.bypass().asked();
        }
        rules.claims(op)
    }

    fn rules(&self, ours: BufferType) -> Claims {
        static RULES: OnceLock<Claims> = OnceLock::new();
        let rules = RULES.get_or_init(|| Claims {
            buffer_type: ours,
            offload_min_batch: self.config().offload_min_batch,
            takes_experts: self.takes_experts(),
            rows_from: None,
            takes_scales: true,
            unplaced: self.config().claim_unplaced,
        });
        Claims { buffer_type: ours, ..*rules }
    }
}
