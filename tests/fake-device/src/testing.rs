//! Helpers of unit tests.
