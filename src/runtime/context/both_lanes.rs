//! Both lanes of a context, as [`super::dispatch`] sees them: timed, and with the layer of the call at hand.

use super::dispatch::{LaneError, Lanes, Partition};
use crate::ggml::{Graph, InPlace, Status, sys};
use crate::lanes::{ColdLane, HotIndex, HotLane};
use crate::moe::FfnTemplate;
use crate::runtime::timing::Stopwatch;
use crate::{Error, Result};
use std::sync::Arc;

/// Both lanes for one call of a layer.
pub struct BothLanes<'a> {
    pub cold: &'a mut ColdLane,
    pub hot: &'a mut HotLane,
    /// The layer in the hot lane.
    pub layer: HotIndex,
    pub template: &'a Arc<FfnTemplate>,
    pub watch: &'a mut Stopwatch,
    /// Where the split's rows lie on the device, if they may be left there.
    pub place: Option<&'a InPlace<'a>>,
}

/// The whole split on the CPU, timed.
pub fn compute_whole(cold: &mut ColdLane, split: &Graph<'_>, watch: &mut Stopwatch) -> Status {
    watch.launched();
    let status = cold.compute(split);
    watch.computed();
    watch.joined();
    status
}

impl Lanes for BothLanes<'_> {
    fn compute_whole(&mut self, split: &Graph<'_>) -> Status {
        compute_whole(self.cold, split, self.watch)
    }

    fn compute_both(
        &mut self,
        split: &Graph<'_>,
        partition: &Partition,
        meanwhile: impl FnOnce(),
    ) -> Result<Status, LaneError> {
        let Self { cold, hot, layer, template, watch, place } = self;
        let on_the_cpu = || -> Result<Status, Error> {
            watch.launched();
            let status = if partition.cold.is_empty() {
                Ok(sys::GGML_STATUS_SUCCESS)
            } else {
                cold.compute_requests(split, template, &partition.cold)
            };
            watch.computed();
            // The device may still be at work: this costs nothing then.
            meanwhile();
            status
        };
        let is_in_place =
            |place: &&InPlace<'_>| partition.copies.is_empty() && hot.is_in_place(*layer, split, &partition.hot, place);
        let computed = match place.filter(is_in_place) {
            Some(place) => hot.compute_in_place(*layer, split, &partition.hot, place, on_the_cpu),
            None => hot.compute_while(*layer, split, &partition.hot, &partition.copies, on_the_cpu),
        };
        watch.joined();
        match computed {
            Ok(Ok(status)) => status.map_err(LaneError::Cpu),
            Ok(Err(refusal)) => Err(LaneError::Refused(refusal)),
            Err(error) => Err(LaneError::Device(error)),
        }
    }

    fn write_rows(&mut self, split: &Graph<'_>, partition: &Partition) -> Result<()> {
        if self.place.is_some_and(InPlace::is_done) {
            return Ok(());
        }
        self.hot.write_rows(self.layer, split, &partition.hot)?;
        if partition.cold.is_empty() { Ok(()) } else { self.cold.write_rows(split, self.template, &partition.cold) }
    }
}
