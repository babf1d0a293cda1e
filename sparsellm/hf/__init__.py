"""Hugging Face: conversion of models, published sparse checkpoints, the hub, and model cards."""
