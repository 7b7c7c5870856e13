//! One conformance suite for all copy engines.
//!
//! `healthy` is for any device. The others need one that can be made slow, fail or hang, and each of these a process of
//! its own (`in_a_process_of_its_own`): what they do to the device stays done. Every check makes engines of its own.

mod process;
mod target;

pub(crate) use process::{beside_this_program, in_a_process_of_its_own, run_again, search_path, test_of};
pub(crate) use target::{Bytes, Target, tensor};

use super::{Copy, CopyEngine, Outcome, STAGING_BYTES, Started, staging_blocks};
use crate::device::PoolTensor;
use crate::ggml::{Device, sys};
use crate::units::Slot;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Longer than any copy here takes, on any machine.
pub(crate) const LONG: Duration = Duration::from_secs(30);
/// What a copy takes on a slow device.
const SLOW: Duration = Duration::from_millis(250);
/// Of engines whose copies never end.
const SHORT_TIMEOUT: Duration = Duration::from_secs(3);

/// Engines of one kind, and a device to try them on.
pub(crate) struct Subject<'a> {
    /// A new engine for experts of up to so many bytes, with so much timeout.
    pub(crate) make: &'a dyn Fn(usize, Duration) -> Box<dyn CopyEngine>,
    /// Where pools lie, and what reads them back.
    pub(crate) device: Device,
}

impl Subject<'_> {
    fn engine(&self, target: &Target) -> Box<dyn CopyEngine> {
        self.with_timeout(target, LONG)
    }

    fn with_timeout(&self, target: &Target, timeout: Duration) -> Box<dyn CopyEngine> {
        (self.make)(target.expert_bytes(), timeout)
    }

    /// A layer's tensors of several types and sizes, some of them small and odd.
    fn layer(&self) -> Target {
        Target::new(self.device, &layer_shapes(), 5)
    }

    /// Three tensors of a size that takes its time.
    fn large_layer(&self) -> Target {
        let shapes = [(); 3].map(|()| tensor(sys::GGML_TYPE_F32, &[1024, 100]));
        Target::new(self.device, &shapes, 8)
    }
}

fn layer_shapes() -> [PoolTensor; 6] {
    [
        tensor(sys::GGML_TYPE_Q8_0, &[64, 32]),
        tensor(sys::GGML_TYPE_Q4_0, &[64, 32]),
        tensor(sys::GGML_TYPE_Q6_K, &[256, 16]),
        tensor(sys::GGML_TYPE_F32, &[32]),
        tensor(sys::GGML_TYPE_F32, &[1]),
        tensor(sys::GGML_TYPE_F16, &[33, 3]),
    ]
}

/// Everything that can be asked of an engine on a device that works.
pub(crate) fn healthy(subject: &Subject<'_>) {
    bytes_arrive_in_their_slot_and_nowhere_else(subject);
    a_slot_can_be_filled_again(subject);
    copies_come_back_in_order(subject);
    full_until_one_has_come_back(subject);
    unreadable_experts_are_not_reported_and_free_their_block(subject);
    experts_that_are_too_large_are_not_read(subject);
    with_nothing_in_flight_there_is_no_wait(subject);
    a_slot_that_is_not_there_is_not_filled(subject);
    layers_of_several_sizes_share_an_engine(subject);
    an_engine_can_be_made_in_one_thread_and_used_in_another(subject);
    dropping_lets_go_of_the_pools(subject);
    experts_larger_than_all_staging_arrive(subject);
}

pub(crate) fn start(engine: &mut dyn CopyEngine, target: &Target, id: u64, slot: u16, bytes: &Bytes) -> Started {
    let copy = Copy { id, target: target.writer.clone(), slot: Slot(slot) };
    engine.start(copy, &mut |block| {
        block.copy_from_slice(bytes);
        true
    })
}

fn bytes_arrive_in_their_slot_and_nowhere_else(subject: &Subject<'_>) {
    let target = subject.layer();
    let mut expected = target.zeros();
    for slot in [1, 3, 0, 4] {
        let mut engine = subject.engine(&target);
        let expert = target.expert(slot.into());
        assert_eq!(start(&mut *engine, &target, 7, slot, &expert), Started::Yes);
        assert_eq!(engine.wait(LONG), Some((7, Outcome::Whole)));
        expected.put(slot, &expert);
        target.assert_holds(&expected);
    }
}

fn a_slot_can_be_filled_again(subject: &Subject<'_>) {
    let target = subject.layer();
    let (mut engine, mut expected) = (subject.engine(&target), target.zeros());
    for id in 0..40 {
        let (slot, expert) = ((id % 3) as u16, target.expert(id));
        assert_eq!(start(&mut *engine, &target, id, slot, &expert), Started::Yes);
        expected.put(slot, &expert);
        if id % 2 == 1 {
            assert_eq!(engine.wait(LONG), Some((id - 1, Outcome::Whole)));
            assert_eq!(engine.wait(LONG), Some((id, Outcome::Whole)));
            target.assert_holds(&expected);
        }
    }
}

fn copies_come_back_in_order(subject: &Subject<'_>) {
    let target = subject.layer();
    let (mut engine, mut expected) = (subject.engine(&target), target.zeros());
    for (id, slot) in [(30, 4), (10, 0), (20, 2), (11, 1)] {
        assert_eq!(start(&mut *engine, &target, id, slot, &target.expert(id)), Started::Yes);
        expected.put(slot, &target.expert(id));
    }
    for (left, id) in [(3, 30), (2, 10), (1, 20), (0, 11)] {
        assert_eq!(engine.wait(LONG), Some((id, Outcome::Whole)));
        assert_eq!(engine.in_flight(), left);
    }
    target.assert_holds(&expected);
}

fn full_until_one_has_come_back(subject: &Subject<'_>) {
    let target = subject.layer();
    let (mut engine, mut expected) = (subject.engine(&target), target.zeros());
    let (blocks, size) = staging_blocks(target.expert_bytes());
    assert!(blocks == 2 || blocks * size <= STAGING_BYTES);
    let put = |engine: &mut dyn CopyEngine, id: u64| start(engine, &target, id, (id % 5) as u16, &target.expert(id));
    for id in 0..blocks as u64 {
        assert_eq!(engine.in_flight() as u64, id);
        assert_eq!(put(&mut *engine, id), Started::Yes);
    }
    for next in 0..10 {
        let mut was_read = false;
        let copy = Copy { id: 99, target: target.writer.clone(), slot: Slot(0) };
        assert_eq!(engine.start(copy, &mut |_| std::mem::replace(&mut was_read, true)), Started::Full);
        assert!(!was_read && engine.in_flight() == blocks);
        assert_eq!(engine.wait(LONG), Some((next, Outcome::Whole)));
        assert_eq!(put(&mut *engine, next + blocks as u64), Started::Yes);
    }
    for id in 10..10 + blocks as u64 {
        assert_eq!(engine.wait(LONG), Some((id, Outcome::Whole)));
    }
    assert_eq!(engine.in_flight(), 0);
    for id in 0..10 + blocks as u64 {
        expected.put((id % 5) as u16, &target.expert(id));
    }
    target.assert_holds(&expected);
}

fn unreadable_experts_are_not_reported_and_free_their_block(subject: &Subject<'_>) {
    let target = subject.layer();
    let mut engine = subject.engine(&target);
    let (blocks, _) = staging_blocks(target.expert_bytes());
    for id in 0..3 * blocks as u64 {
        let copy = Copy { id, target: target.writer.clone(), slot: Slot(2) };
        let mut asked_for = 0;
        let started = engine.start(copy, &mut |block| {
            asked_for = block.len();
            block.fill(0xee);
            false
        });
        assert_eq!((started, asked_for), (Started::Unreadable, target.expert_bytes()));
        assert_eq!((engine.in_flight(), engine.wait(Duration::ZERO)), (0, None));
    }
    target.assert_holds(&target.zeros());
    assert_eq!(start(&mut *engine, &target, 1, 2, &target.expert(1)), Started::Yes);
    assert_eq!(engine.wait(LONG), Some((1, Outcome::Whole)));
}

fn experts_that_are_too_large_are_not_read(subject: &Subject<'_>) {
    let (target, large) = (subject.layer(), subject.large_layer());
    let mut engine = subject.engine(&target);
    let copy = Copy { id: 0, target: large.writer.clone(), slot: Slot(0) };
    assert_eq!(engine.start(copy, &mut |_| panic!("nothing to read into")), Started::Unreadable);
    assert_eq!(engine.in_flight(), 0);
    assert_eq!(Arc::strong_count(&large.writer), 1);
}

fn with_nothing_in_flight_there_is_no_wait(subject: &Subject<'_>) {
    let target = subject.layer();
    let mut engine = subject.engine(&target);
    let begin = Instant::now();
    assert_eq!((engine.in_flight(), engine.wait(LONG)), (0, None));
    assert_eq!(start(&mut *engine, &target, 3, 0, &target.expert(3)), Started::Yes);
    assert_eq!(engine.wait(LONG), Some((3, Outcome::Whole)));
    assert_eq!((engine.in_flight(), engine.wait(LONG)), (0, None));
    assert!(begin.elapsed() < LONG);
}

fn a_slot_that_is_not_there_is_not_filled(subject: &Subject<'_>) {
    let target = subject.layer();
    let mut engine = subject.engine(&target);
    match start(&mut *engine, &target, 0, 5, &target.expert(0)) {
        Started::Refused => {}
        Started::Yes => assert_eq!(engine.wait(LONG), Some((0, Outcome::Failed))),
        other => panic!("{other:?}"),
    }
    target.assert_holds(&target.zeros());
}

fn layers_of_several_sizes_share_an_engine(subject: &Subject<'_>) {
    let (small, large) = (subject.layer(), subject.large_layer());
    let mut engine = subject.engine(&large);
    let mut expected = [small.zeros(), large.zeros()];
    for round in 0..3 {
        for (target, expected) in [&small, &large].into_iter().zip(&mut expected) {
            let expert = target.expert(round);
            assert_eq!(start(&mut *engine, target, round, round as u16, &expert), Started::Yes);
            expected.put(round as u16, &expert);
        }
        assert_eq!(engine.wait(LONG), Some((round, Outcome::Whole)));
        assert_eq!(engine.wait(LONG), Some((round, Outcome::Whole)));
    }
    small.assert_holds(&expected[0]);
    large.assert_holds(&expected[1]);
}

fn an_engine_can_be_made_in_one_thread_and_used_in_another(subject: &Subject<'_>) {
    let target = subject.layer();
    let mut engine = subject.engine(&target);
    let expert = target.expert(5);
    thread::scope(|scope| {
        let engine = scope.spawn(|| {
            assert_eq!(start(&mut *engine, &target, 5, 3, &expert), Started::Yes);
            engine
        });
        let mut engine = engine.join().unwrap();
        let outcome = scope.spawn(move || {
            let outcome = engine.wait(LONG);
            thread::spawn(move || drop(engine)).join().unwrap();
            outcome
        });
        assert_eq!(outcome.join().unwrap(), Some((5, Outcome::Whole)));
    });
    let mut expected = target.zeros();
    expected.put(3, &expert);
    target.assert_holds(&expected);
}

fn dropping_lets_go_of_the_pools(subject: &Subject<'_>) {
    let target = subject.large_layer();
    let mut engine = subject.engine(&target);
    for slot in 0..4 {
        assert_eq!(start(&mut *engine, &target, 0, slot, &target.expert(0)), Started::Yes);
    }
    assert_eq!(engine.wait(LONG), Some((0, Outcome::Whole)));
    drop(engine);
    assert_eq!(Arc::strong_count(&target.writer), 1);
    drop(subject.engine(&target));
}

fn experts_larger_than_all_staging_arrive(subject: &Subject<'_>) {
    let shapes = [&[4096, 4000][..], &[4096, 500], &[4096]].map(|ne| tensor(sys::GGML_TYPE_F32, ne));
    let target = Target::new(subject.device, &shapes, 2);
    assert!(target.expert_bytes() > STAGING_BYTES);
    let mut engine = subject.engine(&target);
    let expert = target.expert(9);
    assert_eq!(start(&mut *engine, &target, 1, 1, &expert), Started::Yes);
    assert_eq!(engine.wait(LONG), Some((1, Outcome::Whole)));
    let mut expected = target.zeros();
    expected.put(1, &expert);
    target.assert_holds(&expected);
}

/// What must hold while copies take their time; `set_bandwidth` takes MB (10^6 bytes) per second, 0 is unlimited.
pub(crate) fn slow(subject: &Subject<'_>, set_bandwidth: &dyn Fn(i64)) {
    // A machine can stop for longer than a copy takes: one attempt that it leaves alone is enough.
    const ATTEMPTS: usize = 5;
    let attempt = |_| starting_does_not_wait(subject, set_bandwidth);
    assert!((0..ATTEMPTS).any(attempt), "starting a copy waits for it");
}

/// Sends copies off on a slow device and waits for them. Returns whether all were sent before the first can have ended.
fn starting_does_not_wait(subject: &Subject<'_>, set_bandwidth: &dyn Fn(i64)) -> bool {
    let target = subject.large_layer();
    let experts: Vec<_> = (0..4).map(|id| target.expert(id)).collect();
    let mut expected = target.zeros();
    let mut engine = subject.with_timeout(&target, LONG);
    // 1 MB/s is 1 byte/us
    set_bandwidth(target.expert_bytes() as i64 / SLOW.as_micros() as i64);
    let begin = Instant::now();
    for (id, expert) in experts.iter().enumerate() {
        assert_eq!(start(&mut *engine, &target, id as u64, id as u16, expert), Started::Yes);
        expected.put(id as u16, expert);
    }
    let has_not_waited = begin.elapsed() < SLOW;
    let (wait, short) = (Instant::now(), SLOW / 10);
    let first = engine.wait(short);
    assert!(first.is_some() || wait.elapsed() >= short, "a wait ends before its time");
    // Each begins when its turn comes.
    for id in 0..4 {
        let outcome = first.filter(|_| id == 0).or_else(|| engine.wait(LONG));
        assert_eq!(outcome, Some((id as u64, Outcome::Whole)));
        assert!(begin.elapsed() >= SLOW * (id as u32 + 1), "reported before it was there");
    }
    assert_eq!(engine.in_flight(), 0);
    set_bandwidth(0);
    target.assert_holds(&expected);
    has_not_waited
}

/// A copy that fails is not reported as whole; `fail` makes the nth write to the device from now on fail, once, and the
/// device work for a new engine, if it needs to be told.
pub(crate) fn failing(subject: &Subject<'_>, fail: &dyn Fn(i64)) {
    let target = subject.layer();
    let n_tensors = layer_shapes().len() as i64;
    for nth in 1..=2 * n_tensors {
        fail(nth);
        let mut engine = subject.engine(&target);
        let id_of_failed = ((nth - 1) / n_tensors) as u64;
        for id in 0..2 {
            // Other bytes in every round: nothing that arrived before can be taken for them.
            let started = start(&mut *engine, &target, id, id as u16, &target.expert(1000 + 2 * nth as u64 + id));
            if started == Started::Refused {
                assert!(id >= id_of_failed, "a copy was refused before one failed");
                continue;
            }
            assert_eq!(started, Started::Yes);
            let (reported, outcome) = engine.wait(LONG).unwrap();
            assert_eq!(reported, id);
            match outcome {
                Outcome::Whole => assert_ne!(id, id_of_failed, "tensor {nth} did not arrive"),
                Outcome::Failed => assert!(id >= id_of_failed),
                Outcome::Lost => panic!("a copy that failed is not lost"),
            }
        }
        assert_eq!(engine.in_flight(), 0);
    }
}

/// A copy that never ends is lost in the end; `hang` makes the nth write to the device from now on never end.
pub(crate) fn hanging(subject: &Subject<'_>, hang: &dyn Fn(i64)) {
    let target = subject.layer();
    let n_tensors = layer_shapes().len() as i64;
    let mut engine = subject.with_timeout(&target, SHORT_TIMEOUT);
    hang(n_tensors + 2);
    for id in 0..3 {
        assert_eq!(start(&mut *engine, &target, id, id as u16, &target.expert(id)), Started::Yes);
    }
    assert_eq!(engine.wait(LONG), Some((0, Outcome::Whole)));
    let begin = Instant::now();
    assert_eq!(engine.wait(Duration::ZERO), None);
    assert_eq!(engine.in_flight(), 2);
    assert_eq!(engine.wait(LONG), Some((1, Outcome::Lost)));
    assert!(begin.elapsed() >= SHORT_TIMEOUT * 9 / 10);
    assert!(Arc::strong_count(&target.writer) > 1, "the pool may still be written to");
    drops_at_once(engine);
    // Left alone with all that the device may still use.
    assert!(Arc::strong_count(&target.writer) > 1);
}

/// Dropping an engine ends, even while a copy hangs that nobody has waited for.
pub(crate) fn hanging_unseen(subject: &Subject<'_>, hang: &dyn Fn(i64)) {
    let target = subject.layer();
    let mut engine = subject.with_timeout(&target, SHORT_TIMEOUT);
    hang(2);
    for id in 0..2 {
        assert_eq!(start(&mut *engine, &target, id, id as u16, &target.expert(id)), Started::Yes);
    }
    drops_at_once(engine);
    assert!(Arc::strong_count(&target.writer) > 1, "the pool may still be written to");
}

fn drops_at_once(engine: Box<dyn CopyEngine>) {
    let (dropped, is_dropped) = mpsc::channel();
    thread::spawn(move || {
        drop(engine);
        dropped.send(())
    });
    is_dropped.recv_timeout(LONG).unwrap();
}
