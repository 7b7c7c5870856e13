//! One conformance suite for all copy engines.
