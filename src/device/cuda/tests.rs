//! The engine on a driver that is not there (`tests/fake-cuda`): the conformance suite, and every way in which the driver
//! can fail. "Device memory" is ggml's CPU memory. Each test that loads a driver has a process of its own.

use super::driver::FUNCTIONS;
use super::{CudaEngine, engine_for};
use crate::device::copy::testing::{
    LONG, Subject, Target, beside_this_program, failing, hanging, hanging_unseen, healthy, in_a_process_of_its_own,
    run_again, search_path, slow, start, tensor, test_of,
};
use crate::device::copy::{CopyEngine, Outcome, Started, staging_blocks};
use crate::ggml::test_devices::{keep_log, logged, register_cuda_lookalike};
use crate::ggml::testing::load_cpu;
use crate::ggml::{Device, PIECE_BYTES, PIECES_IN_FLIGHT, sys as ggml};
use cudarc::driver::sys;
use std::ffi::{CString, c_char};
use std::os::unix::fs::symlink;
use std::thread;
use std::time::{Duration, Instant};

/// What a block reads back at most: both ends of eight tensors.
const READ_BACK_BYTES: u64 = 2 * 64 * 8;
/// An address: the fake driver says whose memory all addresses are, whatever they are.
const SOME: usize = 0x1000;

/// Runs `test` again where `library`, one that cargo has built for this program, is found as CUDA's driver.
pub(crate) fn with_library(library: &str, test: &str, body: impl FnOnce()) {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        symlink(beside_this_program(library), folder.path().join(name)).unwrap();
    }
    run_again(test, &[("LD_LIBRARY_PATH", &search_path(folder.path()))], || {
        load_cpu();
        keep_log();
        body();
    });
}

/// The fake driver, found as the real one.
pub(crate) struct FakeDriver;

impl FakeDriver {
    /// Runs the test that `body` is a closure of in a process of its own, with this driver.
    pub(crate) fn with<F: FnOnce(&Self)>(body: F) {
        with_library("libfake_cuda.so", test_of(&body), || {
            // SAFETY: only asks for the library's path.
            let function = unsafe { sys::culib().get::<unsafe extern "C" fn()>("fake_cuda_set") };
            assert!(function.is_ok(), "the fake driver was not found");
            body(&Self);
        });
    }

    /// Changes a setting, or sets a fault.
    pub(crate) fn set(&self, name: &str, value: i64) {
        let c_name = CString::new(name).unwrap();
        // SAFETY: the fake driver documents this name with exactly this signature.
        let is_known = unsafe {
            let set = sys::culib().get::<unsafe extern "C" fn(*const c_char, i64) -> bool>("fake_cuda_set").unwrap();
            set(c_name.as_ptr(), value)
        };
        assert!(is_known, "the fake driver has no setting {name}");
    }

    /// Reads a counter; `u64::MAX` for a function that has not been called.
    pub(crate) fn stat(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        // SAFETY: as for `set`.
        unsafe {
            let stat = sys::culib().get::<unsafe extern "C" fn(*const c_char) -> u64>("fake_cuda_stat").unwrap();
            stat(name.as_ptr())
        }
    }

    fn live(&self) -> [u64; 4] {
        ["contexts", "streams", "events", "page_locked_bytes"].map(|name| self.stat(name))
    }

    fn assert_nothing_is_left(&self) {
        assert_eq!((self.live(), self.stat("misuses")), ([0; 4], 0));
    }
}

fn subject_of<'a>(make: &'a dyn Fn(usize, Duration) -> Box<dyn CopyEngine>) -> Subject<'a> {
    Subject { make, device: Device::cpu().unwrap() }
}

fn page_locked(bytes: usize, timeout: Duration) -> Box<dyn CopyEngine> {
    Box::new(CudaEngine::new(SOME, bytes, true).unwrap().with_timeout(timeout))
}

fn pageable(bytes: usize, timeout: Duration) -> Box<dyn CopyEngine> {
    Box::new(CudaEngine::new(SOME, bytes, false).unwrap().with_timeout(timeout))
}

fn layer() -> Target {
    let shapes = [tensor(ggml::GGML_TYPE_F32, &[64, 32]), tensor(ggml::GGML_TYPE_F32, &[32])];
    Target::new(Device::cpu().unwrap(), &shapes, 4)
}

fn put(engine: &mut dyn CopyEngine, target: &Target, id: u64) -> Started {
    start(engine, target, id, id as u16 % 4, &target.expert(id))
}

#[test]
fn cuda_engines_conform() {
    FakeDriver::with(|driver| {
        healthy(&subject_of(&page_locked));
        driver.assert_nothing_is_left();
        assert_eq!(logged(), [""; 0]);
    });
}

#[test]
fn cuda_engines_conform_with_pageable_memory() {
    FakeDriver::with(|driver| {
        healthy(&subject_of(&pageable));
        let target = layer();
        let (blocks, _) = staging_blocks(target.expert_bytes());
        let engine = pageable(target.expert_bytes(), LONG);
        assert_eq!(driver.stat("page_locked_bytes"), blocks as u64 * READ_BACK_BYTES, "for what is read back only");
        drop(engine);
        driver.assert_nothing_is_left();
    });
}

#[test]
fn cuda_engines_conform_on_a_slow_device() {
    FakeDriver::with(|driver| {
        for make in [page_locked, pageable] {
            slow(&subject_of(&make), &|bandwidth| driver.set("bandwidth_mbs", bandwidth));
        }
        driver.assert_nothing_is_left();
    });
}

#[test]
fn cuda_engines_conform_where_copies_are_refused() {
    FakeDriver::with(|driver| {
        failing(&subject_of(&page_locked), &|nth| driver.set("fault_cuMemcpyHtoDAsync_v2", nth));
        driver.assert_nothing_is_left();
    });
}

#[test]
fn cuda_engines_conform_where_copies_fail_later() {
    FakeDriver::with(|driver| {
        failing(&subject_of(&page_locked), &|nth| {
            driver.set("repair", 1);
            driver.set("fault_async", nth);
        });
        assert!(logged().iter().all(|line| line.contains("CUDA_ERROR_ILLEGAL_ADDRESS")));
    });
}

#[test]
fn cuda_engines_conform_where_copies_are_lost_without_a_word() {
    FakeDriver::with(|driver| {
        failing(&subject_of(&page_locked), &|nth| driver.set("fault_lost", nth));
        assert!(logged().iter().all(|line| line.contains("read back")));
    });
}

#[test]
fn cuda_engines_conform_where_what_is_read_back_is_refused() {
    FakeDriver::with(|driver| {
        let target = layer();
        driver.set("fault_cuMemcpyDtoHAsync_v2", 3);
        let mut engine = page_locked(target.expert_bytes(), LONG);
        assert_eq!(put(&mut *engine, &target, 0), Started::Refused);
        drop(engine);
        driver.assert_nothing_is_left();
    });
}

#[test]
fn cuda_engines_conform_where_a_copy_never_ends() {
    FakeDriver::with(|driver| hanging(&subject_of(&page_locked), &|nth| driver.set("fault_hang", nth)));
}

#[test]
fn cuda_engines_can_be_dropped_while_a_copy_hangs() {
    FakeDriver::with(|driver| hanging_unseen(&subject_of(&page_locked), &|nth| driver.set("fault_hang", nth)));
}

/// Nothing that the device may still use is freed, destroyed or used again.
#[test]
fn after_a_copy_was_lost_everything_is_left_alone() {
    FakeDriver::with(|driver| {
        let target = layer();
        let mut engine = page_locked(target.expert_bytes(), Duration::from_millis(50));
        let live = driver.live();
        driver.set("fault_hang", 1);
        assert_eq!([0, 1].map(|id| put(&mut *engine, &target, id)), [Started::Yes; 2]);
        assert_eq!(engine.wait(LONG), Some((0, Outcome::Lost)));
        assert_eq!(put(&mut *engine, &target, 2), Started::Refused);
        assert_eq!(engine.wait(LONG), Some((1, Outcome::Lost)));
        drop(engine);
        assert_eq!((driver.live(), driver.stat("misuses")), (live, 0));
        assert_eq!(driver.stat("cuStreamDestroy_v2"), u64::MAX);
    });
}

#[test]
fn after_an_error_everything_in_flight_fails_and_nothing_is_started() {
    FakeDriver::with(|driver| {
        let target = layer();
        let mut engine = page_locked(target.expert_bytes(), LONG);
        assert_eq!(put(&mut *engine, &target, 0), Started::Yes);
        assert_eq!(engine.wait(LONG), Some((0, Outcome::Whole)));
        driver.set("latency_us", 20_000);
        driver.set("fault_async", 1);
        for id in 1..3 {
            // The error may have struck before the second is put.
            let started = put(&mut *engine, &target, id);
            assert!(started == Started::Yes || id == 2 && started == Started::Refused);
        }
        while engine.in_flight() > 0 {
            assert!(matches!(engine.wait(LONG), Some((1 | 2, Outcome::Failed))));
        }
        assert_eq!((engine.in_flight(), engine.wait(LONG)), (0, None));
        assert_eq!(put(&mut *engine, &target, 3), Started::Refused);
        let live = driver.live();
        drop(engine);
        assert_eq!(driver.live(), live, "what the device may still use was freed");
    });
}

#[test]
fn a_copy_whose_event_cannot_be_recorded_is_refused_and_kept_until_its_tensors_are_there() {
    FakeDriver::with(|driver| {
        let target = layer();
        let mut engine = page_locked(target.expert_bytes(), LONG);
        driver.set("latency_us", 50_000);
        driver.set("fault_cuEventRecord", 2);
        assert_eq!(
            [0, 1, 2].map(|id| put(&mut *engine, &target, id)),
            [Started::Yes, Started::Refused, Started::Refused]
        );
        assert_eq!(engine.in_flight(), 1);
        assert_eq!(engine.wait(LONG), Some((0, Outcome::Whole)));
        drop(engine);
        driver.assert_nothing_is_left();
    });
}

#[test]
fn dropping_waits_for_what_is_in_flight() {
    FakeDriver::with(|driver| {
        let target = layer();
        let mut engine = page_locked(target.expert_bytes(), LONG);
        driver.set("latency_us", 50_000);
        let begin = Instant::now();
        let mut expected = target.zeros();
        for id in 0..3 {
            assert_eq!(put(&mut *engine, &target, id), Started::Yes);
            expected.put(id as u16, &target.expert(id));
        }
        drop(engine);
        assert!(begin.elapsed() >= Duration::from_millis(300));
        target.assert_holds(&expected);
        driver.assert_nothing_is_left();
    });
}

/// A poll costs a call: there must be a pause between two of them.
#[test]
fn waiting_does_not_spin() {
    FakeDriver::with(|driver| {
        let target = layer();
        let mut engine = page_locked(target.expert_bytes(), LONG);
        driver.set("latency_us", 100_000);
        assert_eq!(put(&mut *engine, &target, 0), Started::Yes);
        let begin = Instant::now();
        assert_eq!(engine.wait(LONG), Some((0, Outcome::Whole)));
        let most = begin.elapsed().as_micros() as u64 / 100 + 1; // one each 100 µs
        let queries = driver.stat("cuEventQuery");
        assert!((1..=most).contains(&queries), "{queries} queries, {most} at most");
    });
}

#[test]
fn a_context_that_cannot_be_made_current_fails_copies_and_no_more() {
    FakeDriver::with(|driver| {
        let target = layer();
        let mut engine = page_locked(target.expert_bytes(), LONG);
        driver.set("fault_cuCtxSetCurrent", 1);
        assert_eq!(put(&mut *engine, &target, 0), Started::Refused);
        drop(engine);
        driver.assert_nothing_is_left();

        let mut engine = page_locked(target.expert_bytes(), LONG);
        assert_eq!(put(&mut *engine, &target, 0), Started::Yes);
        driver.set("fault_cuCtxSetCurrent", 1);
        assert_eq!(engine.wait(LONG), Some((0, Outcome::Failed)));
        let live = driver.live();
        driver.set("fault_cuCtxSetCurrent", 1);
        drop(engine);
        assert_eq!(driver.live(), live, "nothing is freed that may still be used");
    });
}

#[test]
fn without_page_locked_memory_copies_still_arrive_and_one_line_says_so() {
    FakeDriver::with(|driver| {
        for nth in [1, 3] {
            let target = layer();
            let (blocks, size) = staging_blocks(target.expert_bytes());
            driver.set("fault_cuMemHostAlloc", nth);
            let mut engine = page_locked(target.expert_bytes(), LONG);
            let lines = logged();
            assert_eq!(lines.len(), 1, "{lines:?}");
            assert!(lines[0].contains("page-locked") && lines[0].contains("CUDA_ERROR_OUT_OF_MEMORY"), "{lines:?}");
            let read_back = blocks as u64 * READ_BACK_BYTES;
            assert_eq!(driver.stat("page_locked_bytes"), (nth - 1) as u64 * size as u64 + read_back);
            let mut expected = target.zeros();
            for id in 0..2 * blocks as u64 {
                assert_eq!(put(&mut *engine, &target, id), Started::Yes);
                if id >= 4 {
                    assert_eq!(engine.wait(LONG), Some((id - 4, Outcome::Whole)));
                }
                expected.put(id as u16 % 4, &target.expert(id));
            }
            drop(engine);
            target.assert_holds(&expected);
            driver.assert_nothing_is_left();
            assert_eq!(logged(), [""; 0]);
        }
    });
}

#[test]
fn an_engine_that_cannot_be_made_leaves_nothing_behind() {
    FakeDriver::with(|driver| {
        let faults = [
            ("cuInit", 1, "NO_DEVICE"),
            ("cuPointerGetAttribute", 1, "UNKNOWN"),
            ("cuDeviceGet", 1, "INVALID_DEVICE"),
            ("cuDevicePrimaryCtxRetain", 1, "OUT_OF_MEMORY"),
            ("cuCtxSetCurrent", 1, "INVALID_CONTEXT"),
            ("cuStreamCreate", 1, "UNKNOWN"),
            ("cuEventCreate", 1, "UNKNOWN"),
            ("cuEventCreate", 2, "UNKNOWN"),
        ];
        for (function, nth, answer) in faults {
            driver.set(&format!("fault_{function}"), nth);
            let error = CudaEngine::new(SOME, 1 << 20, true).err().unwrap().to_string();
            assert_eq!(error, format!("CUDA: {function}: CUDA_ERROR_{answer}"));
            driver.assert_nothing_is_left();
        }
        driver.set("owner", 7);
        assert!(CudaEngine::new(SOME, 1, true).is_err());
        driver.assert_nothing_is_left();
    });
}

/// A thread that has used another device gets ours back.
#[test]
fn engines_of_two_devices_share_a_thread() {
    FakeDriver::with(|driver| {
        let target = layer();
        let mut engines = [0, 1].map(|ordinal| {
            driver.set("owner", ordinal);
            CudaEngine::new(SOME, 1 << 20, true).unwrap()
        });
        for id in 0..6 {
            engines.iter_mut().for_each(|engine| assert_eq!(put(engine, &target, id), Started::Yes));
            engines.iter_mut().for_each(|engine| assert_eq!(engine.wait(LONG), Some((id, Outcome::Whole))));
        }
        thread::spawn(move || drop(engines)).join().unwrap();
        driver.assert_nothing_is_left();
    });
}

#[test]
fn a_ggml_device_is_found_by_whose_its_memory_is() {
    FakeDriver::with(|driver| {
        let device = register_cuda_lookalike();
        // It is called CUDA0, and is the driver's second.
        driver.set("owner", 1);
        let make = |bytes: usize, _| engine_for(device, bytes, true).unwrap().unwrap();
        healthy(&Subject { make: &make, device });
        assert!(driver.stat("cuPointerGetAttribute") > 0);
        let engine = make(1, LONG);
        assert_eq!((driver.stat("contexts_of_0"), driver.stat("contexts_of_1")), (0, 1));
        drop(engine);
        driver.assert_nothing_is_left();
    });
}

#[test]
fn an_expert_goes_in_pieces_few_at_a_time() {
    FakeDriver::with(|driver| {
        let mib = [tensor(ggml::GGML_TYPE_F32, &[512, 512]), tensor(ggml::GGML_TYPE_F32, &[512, 100])];
        let target = Target::new(Device::cpu().unwrap(), &mib, 4);
        let mut engine = page_locked(target.expert_bytes(), LONG);
        driver.set("latency_us", 1000);
        let mut expected = target.zeros();
        for id in 0..3 {
            assert_eq!(put(&mut *engine, &target, id), Started::Yes);
            expected.put(id as u16, &target.expert(id));
        }
        for id in 0..2 {
            assert_eq!(engine.wait(LONG), Some((id, Outcome::Whole)));
        }
        // The last one is sent to its end while the engine is dropped.
        drop(engine);
        target.assert_holds(&expected);
        assert_eq!(driver.stat("largest_copy"), PIECE_BYTES as u64);
        assert_eq!(driver.stat("most_queued"), (PIECES_IN_FLIGHT * PIECE_BYTES) as u64);
        driver.assert_nothing_is_left();
    });
}

#[test]
fn every_driver_function_that_must_be_there_is_used() {
    FakeDriver::with(|driver| {
        let target = layer();
        let mut engine = CudaEngine::new(SOME, target.expert_bytes(), true).unwrap();
        assert_eq!(put(&mut engine, &target, 0), Started::Yes);
        assert_eq!(engine.wait(LONG), Some((0, Outcome::Whole)));
        drop(engine);
        for function in FUNCTIONS {
            assert_ne!(driver.stat(function), u64::MAX, "{function}");
        }
    });
}

#[test]
fn without_a_driver_there_is_no_engine() {
    in_a_process_of_its_own(|| {
        load_cpu();
        // SAFETY: at most loads the system's driver.
        let has_driver = unsafe { sys::is_culib_present() };
        match CudaEngine::new(SOME, 1, true) {
            Err(error) => {
                assert!(has_driver || error.to_string() == "CUDA: loading libcuda.so: there is no CUDA driver")
            }
            Ok(_) => panic!("this is no device's memory"),
        }
    });
}

#[test]
fn a_library_that_is_no_driver_is_refused() {
    let test = || {
        let error = CudaEngine::new(SOME, 1, true).err().unwrap();
        assert_eq!(error.to_string(), "CUDA: loading libcuda.so: it has no cuInit");
    };
    with_library("libggml_fake.so", test_of(&test), test);
}

#[test]
fn other_devices_have_no_cuda_engine() {
    load_cpu();
    assert!(engine_for(Device::cpu().unwrap(), 1, true).is_none());
}
