"""Attention in torch and TileLang: functions of plain tensors and geometry; nothing here opens a file."""
