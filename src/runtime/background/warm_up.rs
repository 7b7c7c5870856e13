//! Makes contexts' hot lanes ready: scratch memory, graphs, and one computation of each graph, so that no token waits for
//! what a device compiles, loads or captures when it sees a graph for the first time.

use crate::device::Reservation;
use crate::ggml::Level;
use crate::lanes::{HotIndex, HotLane, try_out};
use crate::options::Config;
use crate::runtime::model::Model;
use crate::runtime::model::cache_handle::{CacheHandle, IdleMemory};
use crate::runtime::model::lane_cell::{ContextLane, LaneCell, Loan, Place};
use crate::runtime::model::lane_request::LaneRequest;
use crate::runtime::model::layer_cache::LayerCache;
use crate::units::Bytes;
use crate::{Error, Result};
use std::sync::{Arc, Weak};

/// Why a lane is not ready for a layer.
enum NotReady {
    /// The device cannot compute it, or has no room. The CPU does.
    Refused,
    /// The device has failed.
    Failed(String),
    /// The cache is made anew: a context has come for which nothing was reserved.
    Refill,
}

impl From<Error> for NotReady {
    fn from(error: Error) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Makes the lanes of a model's contexts ready for one cache.
pub struct WarmUp {
    model: Arc<Model>,
    cache: Arc<CacheHandle>,
    /// Of each lane.
    scratch: Bytes,
    max_tokens: usize,
    pinned: bool,
    /// The contexts for which scratch memory was taken before the pools.
    known: Vec<Weak<LaneCell>>,
    /// Until their lanes are made.
    reserved: Vec<Reservation>,
    said_no_room: bool,
}

impl WarmUp {
    /// Reserves scratch memory of this size for each of the model's contexts. `None` if there is not as much.
    pub fn new(model: Arc<Model>, cache: Arc<CacheHandle>, scratch: Bytes, config: &Config) -> Option<Self> {
        let mut warm_up = Self {
            model,
            cache,
            scratch,
            max_tokens: config.max_hot_tokens(),
            pinned: !config.no_host,
            known: Vec::new(),
            reserved: Vec::new(),
            said_no_room: false,
        };
        for cell in warm_up.model.lane_cells() {
            warm_up.reserved.push(warm_up.cache.device.memory().reserve(scratch)?);
            warm_up.known.push(Arc::downgrade(&cell));
        }
        Some(warm_up)
    }

    /// Makes the lanes of these contexts, once. `false`: the device has no room. Fails if the device does.
    pub fn make_lanes(&mut self) -> Result<bool> {
        for (known, reserved) in self.known.clone().iter().zip(std::mem::take(&mut self.reserved)) {
            drop(reserved);
            let Some(cell) = known.upgrade() else { continue };
            let Some(lane) = self.new_lane(&cell, self.scratch)? else { return Ok(false) };
            cell.put(lane);
        }
        Ok(true)
    }

    /// Bytes that were taken.
    pub fn bytes(&self) -> Bytes {
        self.scratch.saturating_mul(self.known.len() as u64)
    }

    /// Does the oldest of what contexts have asked for.
    pub fn answer_one(&mut self) {
        if let Some(request) = self.model.next_lane_request() {
            self.answer(&request);
        }
    }

    fn answer(&mut self, request: &LaneRequest) {
        let (Some(cell), Some(layer)) = (request.cell.upgrade(), request.cache.upgrade()) else { return };
        if !Arc::ptr_eq(&layer.handle, &self.cache) || self.cache.is_over() {
            return;
        }
        let index = match self.prepare(&cell, &layer, request) {
            Ok(index) => Some(index),
            Err(NotReady::Refused) => None,
            Err(NotReady::Failed(why)) => return self.cache.device.turn_off(&why),
            Err(NotReady::Refill) => return self.cache.end_for_refill(),
        };
        // Nobody else answers it.
        let _ = request.answer.set(index);
    }

    fn prepare(
        &mut self,
        cell: &Arc<LaneCell>,
        layer: &Arc<LayerCache>,
        request: &LaneRequest,
    ) -> Result<HotIndex, NotReady> {
        let LaneRequest { template, tensors, width, limit, .. } = request;
        let max_rows = self.max_tokens * template.n_used;
        let trial = try_out(self.cache.device.device(), template, max_rows)?;
        if trial.unsupported.is_some() {
            return Err(NotReady::Refused);
        }
        let scratch = Bytes(trial.scratch_bytes as u64).max(self.scratch);
        // Its context computes on the CPU for as long as the lane is here.
        let (mut lane, loan) = self.lane_in(cell, scratch)?;
        let index = lane.lane.add_layer(&layer.pool, template, tensors, max_rows);
        let warm = lane.lane.warm_up(index, *width, *limit);
        loan.give_back(lane);
        match warm? {
            Ok(()) => Ok(index),
            Err(status) => Err(NotReady::Failed(format!("it refused to compute (ggml status {status})"))),
        }
    }

    /// The context's lane, with this much scratch memory at least.
    fn lane_in(&mut self, cell: &Arc<LaneCell>, scratch: Bytes) -> Result<(Box<ContextLane>, Loan), NotReady> {
        let taken = cell.wait_and_take();
        // Whatever comes of it, nobody waits for a lane that is not there.
        let loan = Loan::of(cell);
        if let Place::Here(lane) = taken {
            if Arc::ptr_eq(&lane.cache, &self.cache) && lane.lane.scratch_bytes() >= bytes(scratch) {
                return Ok((lane, loan));
            }
            // The old memory goes before the new one comes.
            drop(lane);
        }
        let memory = self.cache.device.memory().clone();
        let planning = memory.begin_planning();
        let made = self.new_lane(cell, scratch)?;
        drop(planning);
        match made {
            Some(lane) => Ok((lane, loan)),
            None => Err(self.no_room(cell)),
        }
    }

    /// A lane for a context; `None` if there is no room.
    fn new_lane(&self, cell: &Arc<LaneCell>, scratch: Bytes) -> Result<Option<Box<ContextLane>>> {
        let memory = self.cache.device.memory();
        let mut lane = HotLane::new(self.cache.device.device(), self.pinned)?;
        let mut made = memory.allocate(scratch, || lane.grow(bytes(scratch)).then_some(()));
        if made.is_none() {
            // What was planned is taken. There may be more by now.
            memory.plan();
            made = memory.allocate(scratch, || lane.grow(bytes(scratch)).then_some(()));
        }
        let Some(((), _scratch)) = made else { return Ok(None) };
        let cell: Arc<dyn IdleMemory> = cell.clone();
        self.cache.note_idle_memory(Arc::downgrade(&cell));
        Ok(Some(Box::new(ContextLane { lane, cache: self.cache.clone(), _scratch })))
    }

    /// What follows when there is no room for a context's lane. If it has come since the plan, a new plan counts it.
    fn no_room(&mut self, cell: &Arc<LaneCell>) -> NotReady {
        if !self.known.iter().any(|known| known.as_ptr() == Arc::as_ptr(cell)) {
            return NotReady::Refill;
        }
        if !std::mem::replace(&mut self.said_no_room, true) {
            let name = self.cache.device.device().name();
            self.cache
                .log(Level::Warn, &format!("no room on {name} for a context's scratch memory: it computes on the CPU"));
        }
        NotReady::Refused
    }
}

fn bytes(size: Bytes) -> usize {
    usize::try_from(size.0).unwrap_or(usize::MAX)
}
